// Sandboxes of one test file: made on the node that E2B_API_URL names, and gone when the file is done.
import { after } from 'node:test'
import { Sandbox } from 'e2b'

const made = new Set()

after(async () => {
  await Promise.allSettled([...made].map((id) => Sandbox.kill(id)))
})

export async function create(opts = {}) {
  const sandbox = await Sandbox.create('base', { timeoutMs: 300_000, ...opts })
  return keep(sandbox)
}

export function keep(sandbox) {
  made.add(sandbox.sandboxId)
  return sandbox
}

// The first true value of `condition`, which may be async; an error after `seconds`.
export async function eventually(condition, what, seconds = 30) {
  const deadline = Date.now() + seconds * 1000
  for (;;) {
    const value = await condition()
    if (value) return value
    if (Date.now() > deadline) throw new Error(`waited ${seconds} s for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}
