// The clients that people have, against a gateway: node clients.mjs GATEWAY SIM
// GATEWAY, SIM: base URLs. With a third and a fourth argument, KIND and PROMPT: one client asks once and prints the text.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { GoogleGenAI } from '@google/genai';
import { GoogleGenerativeAI } from '@google/generative-ai';
import OpenAI from 'openai';
import { createGoogleGenerativeAI } from '@ai-sdk/google';
import { generateText, streamText } from 'ai';
import { EventSource } from 'eventsource';

const [gateway, sim, kind, prompt] = process.argv.slice(2);
const model = 'gemini-2.5-flash';

const genai = new GoogleGenAI({ apiKey: 'client-key', httpOptions: { baseUrl: gateway } });
const legacy = new GoogleGenerativeAI('client-key').getGenerativeModel({ model }, { baseUrl: gateway });
const openai = new OpenAI({ apiKey: 'client-key', baseURL: `${gateway}/v1beta/openai/`, maxRetries: 0 });
const aisdk = createGoogleGenerativeAI({ apiKey: 'client-key', baseURL: `${gateway}/v1beta` })(model);

async function joined(chunks, textOf) {
  let text = '';
  for await (const chunk of chunks) text += textOf(chunk) ?? '';
  return text;
}

// Each client's own way to stream an answer's text, and to ask for it in one piece.
const streams = {
  genai: async (text, more) =>
    joined(await genai.models.generateContentStream({ model, contents: text, ...more }), (chunk) => chunk.text),
  legacy: async (text) => {
    const answer = await legacy.generateContentStream(text);
    answer.response.catch(() => {}); // it fails beside the stream, which tells us
    return joined(answer.stream, (chunk) => chunk.text());
  },
  openai: async (text) =>
    joined(
      await openai.chat.completions.create({ model, stream: true, messages: [{ role: 'user', content: text }] }),
      (chunk) => chunk.choices[0]?.delta?.content,
    ),
  aisdk: async (text) => {
    let failure;
    const answer = streamText({ model: aisdk, prompt: text, maxRetries: 0, onError: ({ error }) => (failure = error) });
    const all = await joined(answer.textStream, (piece) => piece);
    if (failure) throw failure;
    return all;
  },
};
const whole = {
  genai: async (text) => (await genai.models.generateContent({ model, contents: text })).text,
  legacy: async (text) => (await legacy.generateContent(text)).response.text(),
  openai: async (text) =>
    (await openai.chat.completions.create({ model, messages: [{ role: 'user', content: text }] })).choices[0].message
      .content,
  aisdk: async (text) => (await generateText({ model: aisdk, prompt: text, maxRetries: 0 })).text,
};

if (kind) {
  process.stdout.write(await { ...streams }[kind](prompt));
  process.exit(0);
}

const calls = async () => (await (await fetch(`${sim}/sim/calls`)).json()).calls;
const fails = async (promise) => {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail('an error was expected, and the client took the answer for whole');
};

const tests = {
  async 'every client streams the whole text, and the Gemini ones share one call'() {
    const before = await calls();
    const texts = {};
    for (const [name, ask] of Object.entries(streams)) texts[name] = await ask('tell me [sim events=8]');
    for (const name of ['legacy', 'aisdk']) assert.equal(texts[name], texts.genai);
    assert.ok(texts.genai.startsWith('Answer to: tell me'));
    assert.ok(texts.openai.startsWith('Answer to: tell me'));
    assert.equal((await calls()) - before, 2); // one in Gemini's form, one in OpenAI's
  },
  async 'every client gets an answer in one piece, and the Gemini ones share one call'() {
    const before = await calls();
    const texts = {};
    for (const [name, ask] of Object.entries(whole)) texts[name] = await ask('in one piece [sim events=8]');
    for (const name of ['legacy', 'aisdk']) assert.equal(texts[name], texts.genai);
    assert.ok(texts.openai.startsWith('Answer to: in one piece'));
    assert.equal((await calls()) - before, 2);
  },
  async 'thoughts stay apart from the text'() {
    const chunks = await genai.models.generateContentStream({ model, contents: 'think [sim events=4 thoughts=2]' });
    let thoughts = 0;
    let finish;
    for await (const chunk of chunks) {
      for (const part of chunk.candidates?.[0]?.content?.parts ?? []) if (part.thought) ++thoughts;
      finish = chunk.candidates?.[0]?.finishReason ?? finish;
    }
    assert.equal(thoughts, 2);
    assert.equal(finish, 'STOP');
  },
  async 'an error before the first byte is an error with its status'() {
    for (const [name, ask] of Object.entries({ ...streams })) {
      const error = await fails(ask(`no ${name} [sim status=503]`));
      assert.ok(String(error.status ?? error.statusCode ?? error.message).includes('503'), `${name}: ${error}`);
    }
    for (const [name, ask] of Object.entries({ ...whole })) {
      const error = await fails(ask(`neither ${name} [sim status=503]`));
      assert.ok(String(error.status ?? error.statusCode ?? error.message).includes('503'), `${name}: ${error}`);
    }
  },
  async 'no client takes an answer that breaks off for whole'() {
    for (const how of ['cut-after=2', 'truncate-after=2', 'error-after=2', 'bare-error-after=2']) {
      for (const [name, ask] of Object.entries(streams)) await fails(ask(`${name} breaks [sim events=6 ${how}]`));
    }
  },
  async 'openai tries again after a 429, as the response says'() {
    const patient = new OpenAI({ apiKey: 'x', baseURL: `${gateway}/v1beta/openai/`, maxRetries: 2 });
    const answer = await patient.chat.completions.create({
      model,
      messages: [{ role: 'user', content: 'again [sim fail-first=1 status=429 retry=1s]' }],
    });
    assert.ok(answer.choices[0].message.content.startsWith('Answer to: again'));
  },
  async 'a client that aborts, or breaks out of its loop, leaves the answer to the others'() {
    const abort = new AbortController();
    const text = 'leave [sim events=6 gap=50ms]';
    const stays = streams.legacy(text);
    const error = fails(streams.genai(text, { config: { abortSignal: abort.signal } }));
    for await (const _ of await genai.models.generateContentStream({ model, contents: text })) {
      abort.abort();
      break;
    }
    await error;
    assert.equal(await stays, await streams.aisdk(text));
  },
  async 'countTokens and models are passed on'() {
    assert.ok((await genai.models.countTokens({ model, contents: 'count me' })).totalTokens > 0);
    assert.equal((await genai.models.get({ model })).name, `models/${model}`);
  },
  async 'an EventSource reads a stream to its end, and asks no more'() {
    const created = await fetch(`${gateway}/v1/streams?model=${model}`, {
      method: 'POST',
      body: JSON.stringify({ contents: [{ role: 'user', parts: [{ text: 'events [sim events=5 gap=20ms]' }] }] }),
    });
    assert.equal(created.status, 201);
    const source = new EventSource(gateway + (await created.json()).url);
    const ids = [];
    await new Promise((resolve, reject) => {
      source.onmessage = (event) => ids.push(event.lastEventId);
      // Not closed at the end: it comes back with the last id, and is told that there is no more.
      source.onerror = (event) => event.code === 204 && resolve();
      setTimeout(() => reject(new Error('it is never told that there is no more')), 30_000).unref();
    });
    source.close();
    assert.deepEqual(ids.map((id) => id.split('.')[1]), ['1', '2', '3', '4', '5']);
  },
  async 'twenty processes of different kinds with one prompt cause one call a form'() {
    const before = await calls();
    const kinds = Object.keys(streams);
    const said = await Promise.all(
      Array.from({ length: 20 }, (_, i) => {
        const child = spawn(process.execPath, [
          fileURLToPath(import.meta.url), gateway, sim, kinds[i % kinds.length], 'all of us [sim events=10 gap=30ms]',
        ], { stdio: ['ignore', 'pipe', 'inherit'] });
        let out = '';
        child.stdout.on('data', (piece) => (out += piece));
        return new Promise((resolve) => child.on('close', (code) => resolve([kinds[i % kinds.length], code, out])));
      }),
    );
    for (const [name, code, out] of said) {
      assert.equal(code, 0, name);
      assert.equal(out, said.find(([other]) => (other === 'openai') === (name === 'openai'))[2], name);
    }
    assert.equal((await calls()) - before, 2);
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
    console.log(`ok: ${name}`);
  } catch (error) {
    ++failed;
    console.log(`FAILED: ${name}\n${error.stack ?? error}`);
  }
}
process.exit(failed === 0 ? 0 : 1);
