// Templates as the SDK builds them. Each has a name of its own, and all are gone when the file is done.
import assert from 'node:assert/strict'
import { chmod, mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { BuildError, Sandbox, SandboxError, Template, TemplateError, waitForPort } from 'e2b'
import { create, eventually, keep } from './support.mjs'

const mark = `js-${Date.now()}`
const names = new Set()
let fileContextPath

before(async () => {
  fileContextPath = await mkdtemp(join(tmpdir(), 'context-'))
  await mkdir(join(fileContextPath, 'app/sub'), { recursive: true })
  await writeFile(join(fileContextPath, 'app/main.txt'), 'main')
  await writeFile(join(fileContextPath, 'app/sub/deep.txt'), 'deep')
  await symlink('main.txt', join(fileContextPath, 'app/link'))
  await writeFile(join(fileContextPath, 'run.sh'), '#!/bin/sh\necho ran\n')
  await chmod(join(fileContextPath, 'run.sh'), 0o750)
  await writeFile(join(fileContextPath, 'big.bin'), Buffer.alloc(5_000_000, 'abc'))
})

after(async () => {
  const headers = { 'X-API-Key': process.env.E2B_API_KEY }
  for (const name of names) {
    await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { method: 'DELETE', headers })
  }
  await rm(fileContextPath, { recursive: true })
})

function named(suffix) {
  names.add(`${mark}-${suffix}`)
  return `${mark}-${suffix}`
}

async function build(template, name, opts = {}) {
  const logs = []
  const info = await Template.build(template, name, { ...opts, onBuildLogs: (entry) => logs.push(entry.message) })
  return { info, logs }
}

test('templates: steps, files, environment, a server that is started', async () => {
  const name = named('steps')
  const template = Template({ fileContextPath })
    .fromTemplate('base')
    .copy('app', 'app')
    .copy('run.sh', '/usr/local/bin/run', { user: 'root', mode: 0o755 })
    .copyItems([{ src: 'big.bin', dest: '/srv/' }])
    .setEnvs({ COLOUR: 'green', TWICE: '$COLOUR $COLOUR' })
    .runCmd(['whoami > who', 'echo $TWICE >> who'])
    .makeDir('web')
    .makeSymlink('/home/user/app/main.txt', 'web/index.html')
    .setWorkdir('/home/user/web')
    .setStartCmd('python3 -m http.server 8123', waitForPort(8123))
  const { info, logs } = await build(template, name)
  assert.equal(info.name, name)
  assert.ok(logs.some((line) => line.startsWith('[1/') && line.includes('COPY')), logs.join('\n'))
  const sandbox = keep(await Sandbox.create(name))
  const seen = await sandbox.commands.run('run; cat ../who; curl -s localhost:8123; ls -F ../app; wc -c < /srv/big.bin')
  assert.equal(seen.stdout, 'ran\nuser\ngreen green\nmainlink@\nmain.txt\nsub/\n5000000\n')
  assert.equal((await sandbox.commands.run('pwd; echo $COLOUR')).stdout, '/home/user/web\ngreen\n')
})

test('templates: from an image of a private registry', { skip: !process.env.AENV_TEST_IMAGE }, async () => {
  const { AENV_TEST_IMAGE: image, AENV_TEST_IMAGE_USER: username, AENV_TEST_IMAGE_PASSWORD: password } = process.env
  const name = named('image')
  await assert.rejects(build(Template().fromImage(image), name), BuildError)
  const { logs } = await build(Template().fromImage(image, { username, password }).runCmd('echo from=$FROM_IMAGE; pwd'), name)
  assert.ok(logs.includes('from=yes') && logs.includes('/app'), logs.join('\n'))
  assert.equal((await keep(await Sandbox.create(name)).commands.run('echo $FROM_IMAGE')).stdout, 'yes\n')
})

test('templates: unchanged steps are cached, and may be done again', async () => {
  const name = named('cached')
  const template = (last) => Template().fromTemplate('base').runCmd('date +%s%N > stamp').runCmd(last)
  await build(template('echo 1'), name)
  const { logs } = await build(template('echo 2'), name)
  assert.equal(logs.filter((line) => line.startsWith('CACHED')).length, 1)
  const again = await build(template('echo 2'), name, { skipCache: true })
  assert.deepEqual(again.logs.filter((line) => line.startsWith('CACHED')), [])
})

test('templates: built in the background, with their failure', async () => {
  const name = named('background')
  assert.equal(await Template.exists(name), false)
  const info = await Template.buildInBackground(Template().fromTemplate('base').runCmd('echo begun; exit 3'), name)
  const status = await eventually(async () => {
    const seen = await Template.getBuildStatus(info)
    return seen.status === 'error' && seen
  }, 'the build to fail')
  assert.equal(status.reason.step, '1')
  assert.match(status.reason.message, /exit status 3/)
  assert.ok(status.logEntries.some((entry) => entry.message === 'begun' && entry.level === 'info'))
  await assert.rejects(Sandbox.create(name), SandboxError)
  await assert.rejects(build(Template().fromTemplate('base').runCmd('exit 4'), name), BuildError)
})

test('templates: tags are assigned, moved, removed', async () => {
  const name = named('tagged')
  const template = (version) => Template().fromTemplate('base').runCmd(`echo ${version} > v`)
  const first = await build(template(1), `${name}:v1`)
  assert.deepEqual(first.info.tags, ['v1'])
  await build(template(2), name, { tags: ['v2', 'default'] })
  assert.equal(await keep(await Sandbox.create(name)).files.read('v'), '2\n')
  const assigned = await Template.assignTags(`${name}:v1`, ['stable', 'default'])
  assert.deepEqual([assigned.buildId, assigned.tags], [first.info.buildId, ['stable', 'default']])
  assert.equal(await keep(await Sandbox.create(name)).files.read('v'), '1\n')
  await Template.removeTags(name, ['v1', 'v2'])
  assert.deepEqual((await Template.getTags(name)).map((tag) => tag.tag).sort(), ['default', 'stable'])
  assert.equal(await Template.exists(`${name}:v2`), false)
  await assert.rejects(Template.removeTags(name, 'v2'), TemplateError)
})

test('templates: CPUs, memory and free disk are as asked for', async () => {
  const name = named('sizes')
  await build(Template().fromTemplate('base'), name, { memoryMB: 256, cpuCount: 1, minFreeDiskMb: 5000 })
  const sandbox = keep(await Sandbox.create(name))
  assert.equal((await sandbox.getInfo()).memoryMB, 256)
  const free = await sandbox.commands.run("df -Pk / | awk 'NR == 2 { print int($4 / 1024) }'")
  assert.ok(Number(free.stdout) >= 4950, free.stdout)
})

test('templates from snapshots: by name and by id', async () => {
  const sandbox = await create()
  await sandbox.files.write('f', 'kept')
  const name = named('snapshot')
  const { snapshotId } = await sandbox.createSnapshot({ name })
  for (const source of [name, snapshotId]) {
    assert.equal(await Template.exists(source), true)
    const { logs } = await build(Template().fromTemplate(source).runCmd(`cat f; echo; echo ${source}`), named('derived'))
    assert.ok(logs.includes('kept'), logs.join('\n'))
  }
  assert.equal(await keep(await Sandbox.create(`${mark}-derived`)).files.read('f'), 'kept')
})
