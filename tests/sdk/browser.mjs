// A page with two EventSources on one stream, in Chromium: node browser.mjs CHROMIUM GATEWAY RESTART PORT SIM
// RESTART: a command that ends the gateway and starts it again at the same place, run once both have read some. SIM
// holds the rest of the answer back until both have come again.
// The page is served here, at PORT, so that it is of another origin than the gateway, as pages are.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const [chromium, gateway, restart, pagePort, sim] = process.argv.slice(2);

const created = await fetch(`${gateway}/v1/streams?model=gemini-2.5-flash`, {
  method: 'POST',
  body: JSON.stringify({ contents: [{ role: 'user', parts: [{ text: 'two tabs [sim events=30 hold-after=10]' }] }] }),
});
assert.equal(created.status, 201);
const { url } = await created.json();

const page = `<!doctype html><script>
const told = (what) => fetch('/told', { method: 'POST', body: JSON.stringify(what) });
for (const tab of [1, 2]) {
  const source = new EventSource(${JSON.stringify(gateway + url)});
  const ids = [], texts = [];
  let opened = 0;
  source.onopen = () => {
    if (++opened === 2) told({ tab, again: true });
  };
  source.onmessage = (event) => {
    ids.push(event.lastEventId.split('.')[1]);
    texts.push(JSON.parse(event.data).candidates[0].content.parts[0].text);
    if (ids.length === 3) told({ tab, begun: true });
  };
  source.addEventListener('end', (event) => {
    source.close();
    told({ tab, ids, text: texts.join(''), opened, end: JSON.parse(event.data) });
  });
}
</script>`;

const begun = new Set(), again = new Set();
const results = new Map();
let done;
const finished = new Promise((resolve, reject) => {
  done = resolve;
  const silent = () => reject(new Error(
    `the page tells nothing more: begun ${[...begun]}, again ${[...again]}, ended ${[...results.keys()]}`));
  setTimeout(silent, 90_000).unref();
});
const server = createServer((request, response) => {
  if (request.method !== 'POST') return response.setHeader('Content-Type', 'text/html').end(page);
  let body = '';
  request.on('data', (piece) => (body += piece));
  request.on('end', () => {
    response.end();
    const what = JSON.parse(body);
    if (what.begun && begun.add(what.tab).size === 2) execFile('/bin/sh', ['-c', restart]);
    if (what.again && again.add(what.tab).size === 2) fetch(`${sim}/sim/release`, { method: 'POST' });
    if (what.end && results.set(what.tab, what).size === 2) done();
  });
});
await new Promise((resolve) => server.listen(Number(pagePort), '127.0.0.1', resolve));

const profile = mkdtempSync(join(tmpdir(), 'gcoalesce-browser-'));
const browser = spawn(
  chromium,
  ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', `--user-data-dir=${profile}`,
    `http://127.0.0.1:${pagePort}/`, '--remote-debugging-port=0'],
  { stdio: 'ignore', detached: true }, // a process group of its own, that it can be ended with
);
try {
  await finished;
  const whole = await (await fetch(gateway + url)).text();
  const expected = whole.split('\n').filter((line) => line.startsWith('data: {"candidates"'))
    .map((line) => JSON.parse(line.slice(6)).candidates[0].content.parts[0].text).join('');
  for (const { tab, ids, text, opened, end } of results.values()) {
    assert.deepEqual(ids, Array.from({ length: 30 }, (_, i) => String(i + 1)), `tab ${tab}`);
    assert.equal(text, expected, `tab ${tab}`);
    assert.equal(opened, 2, `tab ${tab} was cut off once`);
    assert.equal(end.ending, 'complete');
  }
  console.log('ok: two EventSources of one page, cut off in the midst, each end with the exact text');
} finally {
  process.kill(-browser.pid, 'SIGKILL');
  server.close();
  await new Promise((resolve) => browser.on('close', resolve));
  try {
    rmSync(profile, { recursive: true, force: true, maxRetries: 20, retryDelay: 100 });
  } catch (error) { // a process of its own session may still write: that proves nothing of ours
    console.log(`left behind: ${error.message}`);
  }
}
