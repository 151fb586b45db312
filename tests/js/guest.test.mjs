// Test names are "feature: what", and "feature (differs): what" or "feature (refused): what" where that is so.
import assert from 'node:assert/strict'
import { before, test } from 'node:test'
import { CommandExitError, FilesystemEventType, TimeoutError } from 'e2b'
import { create, eventually } from './support.mjs'

let sandbox

before(async () => {
  sandbox = await create()
})

test('commands: output, exit code, directory, user, environment', async () => {
  const result = await sandbox.commands.run('id -un; pwd; echo $A; echo oops >&2', { cwd: '/tmp', envs: { A: 'b' } })
  assert.equal(result.stdout, 'user\n/tmp\nb\n')
  assert.equal(result.stderr, 'oops\n')
  assert.equal((await sandbox.commands.run('id -un', { user: 'root' })).stdout, 'root\n')
  await assert.rejects(sandbox.commands.run('echo said; exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.equal(error.exitCode, 7)
    assert.equal(error.stdout, 'said\n')
    return true
  })
})

test('commands, streaming: lines arrive while the command runs', async () => {
  const arrivals = []
  await sandbox.commands.run('for i in 1 2 3; do echo $i; sleep 0.5; done', {
    onStdout: (text) => arrivals.push([text, Date.now()]),
  })
  assert.equal(arrivals.map(([text]) => text).join(''), '1\n2\n3\n')
  assert.ok(arrivals.at(-1)[1] - arrivals[0][1] > 500)
})

test('commands, background: list, connect, kill', async () => {
  const handle = await sandbox.commands.run('sleep 1; echo late; sleep 300', { background: true, timeoutMs: 0 })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === handle.pid))
  let seen = ''
  const second = await sandbox.commands.connect(handle.pid, { onStdout: (text) => (seen += text) })
  await eventually(() => seen.includes('late'), 'output on the second connection')
  assert.equal(await sandbox.commands.kill(handle.pid), true)
  await assert.rejects(handle.wait(), CommandExitError)
  await assert.rejects(second.wait(), CommandExitError)
  assert.equal(await sandbox.commands.kill(handle.pid), false)
})

test('commands, stdin: is sent and closed', async () => {
  let seen = ''
  const handle = await sandbox.commands.run('cat; echo end', {
    background: true,
    stdin: true,
    onStdout: (text) => (seen += text),
  })
  await sandbox.commands.sendStdin(handle.pid, 'hello\n')
  await eventually(() => seen.includes('hello'), 'the echo')
  await sandbox.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'hello\nend\n')
})

test('commands, timeout: ends the command', async () => {
  await assert.rejects(sandbox.commands.run('sleep 60', { timeoutMs: 1_000 }), TimeoutError)
})

test('files: write, read, list, exists, rename, remove', async () => {
  await sandbox.files.write('a/b/text', 'grüße')
  assert.equal(await sandbox.files.read('a/b/text'), 'grüße')
  const bytes = new Uint8Array(1 << 20).map((_, index) => index % 251)
  await sandbox.files.write('a/blob', bytes.buffer)
  assert.deepEqual(await sandbox.files.read('a/blob', { format: 'bytes' }), bytes)
  const stream = await sandbox.files.read('a/blob', { format: 'stream' })
  let size = 0
  for await (const chunk of stream) size += chunk.length
  assert.equal(size, bytes.length)
  const names = (await sandbox.files.list('a')).map((entry) => [entry.name, entry.type])
  assert.deepEqual(names.sort(), [['b', 'dir'], ['blob', 'file']])
  assert.equal((await sandbox.files.getInfo('a/blob')).size, bytes.length)
  await sandbox.files.rename('a/blob', 'a/moved')
  assert.equal(await sandbox.files.exists('a/moved'), true)
  assert.equal(await sandbox.files.exists('a/blob'), false)
  await sandbox.files.remove('a/moved')
  assert.equal(await sandbox.files.exists('a/moved'), false)
  assert.equal(await sandbox.files.makeDir('a/new'), true)
  assert.equal(await sandbox.files.makeDir('a/new'), false)
})

test('files, many: are written in one call', async () => {
  const written = await sandbox.files.write([
    { path: 'many/1', data: 'one' },
    { path: 'many/2', data: 'two' },
  ])
  assert.deepEqual(written.map((entry) => entry.name), ['1', '2'])
  assert.equal(await sandbox.files.read('many/2'), 'two')
})

test('files, watch: events arrive, also from folders below', async () => {
  await sandbox.files.makeDir('watched/below')
  const events = []
  const handle = await sandbox.files.watchDir('watched', (event) => void events.push(event), { recursive: true })
  await sandbox.files.write('watched/one', '1')
  await sandbox.files.write('watched/below/two', '2')
  const has = (name, type) => events.some((event) => event.name === name && event.type === type)
  await eventually(() => has('one', FilesystemEventType.WRITE), 'the write')
  await eventually(() => has('below/two', FilesystemEventType.CREATE), 'the creation below')
  await sandbox.files.remove('watched/one')
  await eventually(() => has('one', FilesystemEventType.REMOVE), 'the removal')
  await handle.stop()
})

test('pty: input, output, resize, kill', async () => {
  let seen = ''
  const decoder = new TextDecoder()
  const terminal = await sandbox.pty.create({
    cols: 80,
    rows: 24,
    timeoutMs: 0,
    onData: (data) => (seen += decoder.decode(data, { stream: true })),
  })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo $((40+2)); stty size\n'))
  await eventually(() => seen.includes('42') && seen.includes('24 80'), 'the answer of the terminal')
  await sandbox.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size\n'))
  await eventually(() => seen.includes('30 100'), 'the new size')
  assert.equal(await sandbox.pty.kill(terminal.pid), true)
  await assert.rejects(terminal.wait(), CommandExitError)
})

test('signed URLs: upload and download without any key', async () => {
  await sandbox.files.write('down', 'loaded')
  const answer = await fetch(await sandbox.downloadUrl('down', { useSignatureExpiration: 60 }))
  assert.equal(answer.status, 200)
  assert.equal(await answer.text(), 'loaded')
  const form = new FormData()
  form.append('file', new Blob(['up']), 'name')
  const upload = await fetch(await sandbox.uploadUrl('up', { useSignatureExpiration: 60 }), { method: 'POST', body: form })
  assert.equal(upload.status, 200)
  assert.equal(await sandbox.files.read('up'), 'up')
  const forged = new URL(await sandbox.downloadUrl('down'))
  forged.searchParams.set('path', '/etc/shadow')
  const refused = await fetch(forged)
  assert.ok(refused.status >= 400)
})

test('git: init, commit, status, branches', async () => {
  await sandbox.git.init('repository', { initialBranch: 'main' })
  await sandbox.git.configureUser('A', 'a@example.org', { scope: 'local', path: 'repository' })
  await sandbox.files.write('repository/file', 'x')
  await sandbox.git.add('repository')
  await sandbox.git.commit('repository', 'first')
  const status = await sandbox.git.status('repository')
  assert.equal(status.currentBranch, 'main')
  assert.equal(status.fileStatus.length, 0)
  await sandbox.git.createBranch('repository', 'other')
  assert.deepEqual((await sandbox.git.branches('repository')).branches.sort(), ['main', 'other'])
})
