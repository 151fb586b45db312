// Test names are "feature: what", and "feature (differs): what" or "feature (refused): what" where that is so.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import {
  AuthenticationError,
  InvalidArgumentError,
  NotFoundError,
  Sandbox,
  SandboxError,
  SandboxNotFoundError,
  Secret,
  Volume,
  VolumePathNotFoundError,
} from 'e2b'
import { create, eventually, keep } from './support.mjs'

test('create: options, information, is running', async () => {
  const sandbox = await create({ metadata: { user: 'a&b=c/ü' }, envs: { COLOUR: 'green' } })
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.name, 'base')
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, { user: 'a&b=c/ü' })
  assert.equal(await sandbox.isRunning(), true)
  assert.equal((await sandbox.commands.run('echo $COLOUR')).stdout, 'green\n')
})

test('list: pages, states, metadata', async () => {
  const mark = { run: String(Date.now()) }
  const ids = []
  for (let n = 0; n < 3; n++) ids.push((await create({ metadata: mark })).sandboxId)
  await Sandbox.pause(ids[0])
  const seen = []
  const paginator = Sandbox.list({ query: { metadata: mark, state: ['running', 'paused'] }, limit: 2 })
  let pages = 0
  while (paginator.hasNext) {
    seen.push(...(await paginator.nextItems()).map((item) => item.sandboxId))
    pages++
  }
  assert.deepEqual(seen.sort(), [...ids].sort())
  assert.equal(pages, 2)
  const paused = await Sandbox.list({ query: { metadata: mark, state: ['paused'] } }).nextItems()
  assert.deepEqual(paused.map((item) => item.sandboxId), [ids[0]])
})

test('timeout: is set, and ends the sandbox', async () => {
  const sandbox = await create({ lifecycle: { onTimeout: 'kill' } })
  const before = (await sandbox.getInfo()).endAt
  await sandbox.setTimeout(600_000)
  assert.ok((await sandbox.getInfo()).endAt > before)
  await sandbox.setTimeout(1_000)
  await eventually(async () => !(await sandbox.isRunning()), 'the sandbox to end')
  await assert.rejects(sandbox.getInfo(), SandboxNotFoundError)
})

test('pause and connect: processes and files go on', async () => {
  const sandbox = await create()
  await sandbox.files.write('kept', 'yes')
  const sleeper = await sandbox.commands.run('sleep 300', { background: true, timeoutMs: 0 })
  assert.equal(await sandbox.pause(), true)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await again.files.read('kept'), 'yes')
  assert.ok((await again.commands.list()).some((process) => process.pid === sleeper.pid))
})

test('fork: children have the past and their own future', async () => {
  const sandbox = await create()
  await sandbox.files.write('story', 'once')
  const children = await sandbox.fork({ count: 2 })
  assert.equal(children.length, 2)
  for (const [number, child] of children.entries()) {
    assert.ok(child instanceof Sandbox, String(child))
    keep(child)
    assert.equal(await child.files.read('story'), 'once')
    await child.files.write('story', `child ${number}`)
  }
  assert.equal(await children[0].files.read('story'), 'child 0')
  assert.equal(await children[1].files.read('story'), 'child 1')
  assert.equal(await sandbox.files.read('story'), 'once')
})

test('metrics: the last hour, and a range', async () => {
  const sandbox = await create()
  const [sample] = await sandbox.getMetrics()
  assert.ok(sample.memUsed > 0 && sample.memUsed < sample.memTotal)
  assert.ok(sample.diskUsed > 0 && sample.diskUsed < sample.diskTotal)
  assert.ok(sample.cpuCount >= 1 && sample.cpuUsedPct >= 0)
  assert.ok(Math.abs(sample.timestamp.getTime() - Date.now()) < 10_000)
  const past = await sandbox.getMetrics({ start: new Date(0), end: new Date(1_000) })
  assert.deepEqual(past, [])
})

test('snapshots: create, start from, list, delete', async () => {
  const sandbox = await create()
  await sandbox.files.write('f', 'then')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.files.write('f', 'later')
  const again = keep(await Sandbox.create(snapshot.snapshotId))
  assert.equal(await again.files.read('f'), 'then')
  const listed = await Sandbox.listSnapshots().nextItems()
  assert.ok(listed.some((found) => found.snapshotId === snapshot.snapshotId))
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
})

test('network rules, changed: take effect', async () => {
  const sandbox = await create()
  await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'] })
  const result = await sandbox.commands.run('curl -sm 3 http://1.1.1.1 || echo closed')
  assert.match(result.stdout, /closed/)
})

test('network rules by domain (refused): say so', async () => {
  const network = { allowOut: ['example.org'], denyOut: ['0.0.0.0/0'] }
  await assert.rejects(create({ network }), /domain name/)
})

test('pause without memory: keeps files', async () => {
  const sandbox = await create()
  await sandbox.files.write('kept', 'yes')
  await sandbox.pause({ keepMemory: false })
  await sandbox.connect()
  assert.equal(await sandbox.files.read('kept'), 'yes')
})

test('kill: once, and then it is gone', async () => {
  const sandbox = await create()
  assert.equal(await sandbox.kill(), true)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  await assert.rejects(sandbox.getMetrics(), SandboxNotFoundError)
})

test('errors: have the classes of the SDK', async () => {
  await assert.rejects(Sandbox.create('base', { apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
  await assert.rejects(Sandbox.create('no-such-template'), (error) => {
    assert.ok(error instanceof SandboxError || error instanceof NotFoundError)
    assert.match(error.message, /no-such-template/)
    return true
  })
  await assert.rejects(Sandbox.connect('i' + 'x'.repeat(19)), SandboxNotFoundError)
  const sandbox = await create()
  await assert.rejects(sandbox.files.read('/no/such'), NotFoundError)
  await assert.rejects(sandbox.files.list('/etc/hostname'), InvalidArgumentError)
  await assert.rejects(sandbox.commands.kill(999_999).then((found) => found || Promise.reject(new NotFoundError('x'))))
})

test('internet access: can be refused', async () => {
  const sandbox = await create({ allowInternetAccess: false })
  const result = await sandbox.commands.run('curl -sm 3 http://1.1.1.1 || echo closed')
  assert.match(result.stdout, /closed/)
})

test('ports: a server in the sandbox is reached by its host', async () => {
  const sandbox = await create()
  await sandbox.commands.run('python3 -m http.server 8080', { background: true, timeoutMs: 0 })
  const api = new URL(process.env.E2B_API_URL)
  assert.match(sandbox.getHost(8080), new RegExp(`^8080-${sandbox.sandboxId}\\.`))
  const answer = await eventually(async () => {
    const headers = { 'e2b-sandbox-id': sandbox.sandboxId, 'e2b-sandbox-port': '8080' }
    const response = await fetch(api, { headers })
    return response.ok && (await response.text())
  }, 'the server in the sandbox')
  assert.match(answer, /Directory listing/)
})

test('secrets (differs): are kept, and not given to sandboxes', async () => {
  const name = `js-${Date.now()}`
  const made = await Secret.create(name, 'hidden', { metadata: { a: 'b' } })
  assert.equal(made.version, 1)
  assert.equal((await Secret.update(name, 'more hidden')).version, 2)
  const info = await Secret.getInfo(name)
  assert.deepEqual(info.metadata, { a: 'b' })
  assert.ok(!JSON.stringify(info).includes('hidden'))
  assert.ok((await Secret.list().nextItems()).some((secret) => secret.name === name))
  assert.equal(await Secret.destroy(made.secretId), true)
  assert.equal(await Secret.exists(name), false)
})

test('volumes: are created, found, destroyed', async () => {
  const name = `js-${Date.now()}`
  const volume = await Volume.create(name)
  assert.ok((await Volume.list()).some((found) => found.name === name))
  assert.equal((await Volume.getInfo(volume.volumeId)).name, name)
  assert.equal(await Volume.destroy(volume.volumeId), true)
})

test('volume content: written, read, listed, removed', async () => {
  const volume = await Volume.create(`js-${Date.now()}`)
  await volume.makeDir('/a/b', { force: true, mode: 0o700 })
  await volume.writeFile('/a/b/f', 'text', { uid: 1000 })
  assert.equal(await volume.readFile('/a/b/f'), 'text')
  const large = new Uint8Array(5_000_000).fill(7)
  await volume.writeFile('/large', new Blob([large]))
  assert.deepEqual(await volume.readFile('/large', { format: 'bytes' }), large)
  const entries = await volume.list('/', { depth: 3 })
  assert.deepEqual(entries.map((entry) => entry.path), ['/a', '/a/b', '/a/b/f', '/large'])
  assert.equal((await volume.updateMetadata('/a/b/f', { mode: 0o600 })).uid, 1000)
  await assert.rejects(volume.readFile('/none'), VolumePathNotFoundError)
  await volume.remove('/a')
  assert.equal(await volume.exists('/a/b/f'), false)
  await Volume.destroy(volume.volumeId)
})

test('volume mounts (refused): say so', async () => {
  await assert.rejects(create({ volumeMounts: { '/data': 'some-volume' } }), /volumes cannot be mounted/)
})
