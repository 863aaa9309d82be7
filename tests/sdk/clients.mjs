// The clients that people have, against a gateway: node clients.mjs GATEWAY SIM
// GATEWAY, SIM: base URLs. With a third and a fourth argument, KIND (of `kinds` below) and PROMPT: one client asks once
// and prints the text.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { GoogleGenAI } from '@google/genai';
import { GoogleGenerativeAI } from '@google/generative-ai';
import OpenAI from 'openai';
import { createGoogleGenerativeAI } from '@ai-sdk/google';
import { generateText, jsonSchema, streamText, tool } from 'ai';
import { EventSource } from 'eventsource';

const [gateway, sim, kind, prompt] = process.argv.slice(2);
const model = 'gemini-2.5-flash';

const genai = new GoogleGenAI({ apiKey: 'client-key', httpOptions: { baseUrl: gateway } });
const legacy = new GoogleGenerativeAI('client-key').getGenerativeModel({ model }, { baseUrl: gateway });
const openai = new OpenAI({ apiKey: 'client-key', baseURL: `${gateway}/v1beta/openai/`, maxRetries: 0 });
const aisdk = createGoogleGenerativeAI({ apiKey: 'client-key', baseURL: `${gateway}/v1beta` })(model);

const asked = (text) => [{ role: 'user', content: text }];

// Each client's own way to stream an answer's text, and to ask for it in one piece. enough(text so far): break out of the
// loop, as somebody does who has read enough.
async function joined(chunks, textOf, enough) {
  let text = '';
  for await (const chunk of chunks) {
    text += textOf(chunk) ?? '';
    if (enough?.(text)) break;
  }
  return text;
}
const streams = {
  genai: async (text, { signal, enough } = {}) =>
    joined(
      await genai.models.generateContentStream({ model, contents: text, config: { abortSignal: signal } }),
      (chunk) => chunk.text,
      enough,
    ),
  legacy: async (text, { signal, enough } = {}) => {
    const answer = await legacy.generateContentStream(text, { signal });
    answer.response.catch(() => {}); // it fails beside the stream, which tells us
    return joined(answer.stream, (chunk) => chunk.text(), enough);
  },
  openai: async (text, { signal, enough } = {}) =>
    joined(
      await openai.chat.completions.create({ model, stream: true, messages: asked(text) }, { signal }),
      (chunk) => chunk.choices[0]?.delta?.content,
      enough,
    ),
  aisdk: async (text, { signal, enough } = {}) => {
    let failure;
    const answer = streamText({
      model: aisdk,
      prompt: text,
      maxRetries: 0,
      abortSignal: signal,
      onError: ({ error }) => (failure = error),
      onAbort: () => (failure = new Error('aborted')),
    });
    const all = await joined(answer.textStream, (piece) => piece, enough);
    if (failure) throw failure;
    return all;
  },
};
const whole = {
  genai: async (text) => (await genai.models.generateContent({ model, contents: text })).text,
  legacy: async (text) => (await legacy.generateContent(text)).response.text(),
  openai: async (text) =>
    (await openai.chat.completions.create({ model, messages: asked(text) })).choices[0].message.content,
  aisdk: async (text) => (await generateText({ model: aisdk, prompt: text, maxRetries: 0 })).text,
};

async function created(text) {
  const response = await fetch(`${gateway}/v1/streams?model=${model}`, {
    method: 'POST',
    body: JSON.stringify({ contents: [{ role: 'user', parts: [{ text }] }] }),
  });
  assert.equal(response.status, 201);
  return gateway + (await response.json()).url;
}

// Reads to what ends an EventSource for good: a response that is no event stream. {ids, text, end, code of that response}
function readEvents(url) {
  const source = new EventSource(url);
  const read = { ids: [], text: '', end: undefined, code: undefined };
  source.onmessage = (event) => {
    read.ids.push(event.lastEventId);
    read.text += JSON.parse(event.data).candidates[0].content.parts[0].text;
  };
  source.addEventListener('end', (event) => (read.end = JSON.parse(event.data)));
  return new Promise((resolve, reject) => {
    const watchdog = setTimeout(() => reject(new Error('it is never told that there is no more')), 60_000);
    source.onerror = (event) => {
      if (event.code === undefined) return; // cut off, and it comes back
      clearTimeout(watchdog);
      source.close();
      resolve({ ...read, code: event.code });
    };
  });
}

const kinds = { eventsource: async (text) => (await readEvents(await created(text))).text };
for (const [name, ask] of Object.entries(streams)) kinds[`${name}-stream`] = (text) => ask(text);
for (const [name, ask] of Object.entries(whole)) kinds[`${name}-whole`] = ask;

if (kind) {
  process.stdout.write(await kinds[kind](prompt));
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
  async 'thoughts stay apart from the text, streamed and not'() {
    const thoughtsOf = (response) => (response.candidates?.[0]?.content?.parts ?? []).filter((part) => part.thought);
    const prompt = 'think [sim events=4 thoughts=2]';
    for (const client of [
      async () => genai.models.generateContentStream({ model, contents: prompt }),
      async () => (await legacy.generateContentStream(prompt)).stream,
    ]) {
      let thoughts = 0;
      let finish;
      for await (const chunk of await client()) {
        thoughts += thoughtsOf(chunk).length;
        finish = chunk.candidates?.[0]?.finishReason ?? finish;
      }
      assert.equal(thoughts, 2);
      assert.equal(finish, 'STOP');
    }
    assert.ok(thoughtsOf(await genai.models.generateContent({ model, contents: prompt })).length > 0);
    assert.ok(thoughtsOf((await legacy.generateContent(prompt)).response).length > 0);
    const answer = streamText({ model: aisdk, prompt, maxRetries: 0 });
    const text = await joined(answer.textStream, (piece) => piece);
    const reasoning = await answer.reasoningText;
    assert.ok(reasoning.length > 0 && text.length > 0 && !text.includes(reasoning));
    const once = await generateText({ model: aisdk, prompt, maxRetries: 0 });
    assert.ok(once.reasoningText.length > 0 && !once.text.includes(once.reasoningText));
  },
  async 'tool calls come whole, streamed and not, with their signature'() {
    const wanted = { city: 'Zürich', days: 2 };
    const parameters = {
      type: 'object',
      properties: { city: { type: 'string' }, days: { type: 'integer' } },
      required: ['city', 'days'],
    };
    const declared = { name: 'get_weather', description: 'The weather of some days', parameters };
    const text = 'weather [sim replay=tool-call.sse]';
    const unary = 'weather [sim replay=tool-call.json]';
    const check = (name, args) => {
      assert.equal(name, 'get_weather');
      assert.deepEqual(typeof args === 'string' ? JSON.parse(args) : args, wanted);
    };

    const config = { tools: [{ functionDeclarations: [declared] }] };
    const made = [];
    let signature;
    for await (const chunk of await genai.models.generateContentStream({ model, contents: text, config })) {
      made.push(...(chunk.functionCalls ?? []));
      for (const part of chunk.candidates?.[0]?.content?.parts ?? []) signature = part.thoughtSignature ?? signature;
    }
    assert.equal(made.length, 1);
    check(made[0].name, made[0].args);
    assert.equal(atob(signature), 'signature-of-a-thought');
    const [called] = (await genai.models.generateContent({ model, contents: unary, config })).functionCalls;
    check(called.name, called.args);

    const armed = new GoogleGenerativeAI('client-key').getGenerativeModel({ model, ...config }, { baseUrl: gateway });
    const streamed = await armed.generateContentStream(text);
    const [first] = (await streamed.response).functionCalls();
    check(first.name, first.args);
    const [second] = (await armed.generateContent(unary)).response.functionCalls();
    check(second.name, second.args);

    const tools = { get_weather: tool({ description: declared.description, inputSchema: jsonSchema(parameters) }) };
    const [third] = await streamText({ model: aisdk, prompt: text, tools, maxRetries: 0 }).toolCalls;
    check(third.toolName, third.input);
    const [fourth] = (await generateText({ model: aisdk, prompt: unary, tools, maxRetries: 0 })).toolCalls;
    check(fourth.toolName, fourth.input);

    const chat = (of) => ({
      model,
      messages: asked(of),
      tools: [{ type: 'function', function: declared }],
    });
    const pieces = [];
    const chunks = await openai.chat.completions.create({
      ...chat('weather [sim replay=tool-call-chat.sse]'),
      stream: true,
    });
    for await (const chunk of chunks) pieces.push(...(chunk.choices[0].delta.tool_calls ?? []));
    assert.equal(pieces.length, 1);
    check(pieces[0].function.name, pieces[0].function.arguments);
    assert.equal(atob(pieces[0].extra_content.google.thought_signature), 'signature-of-a-thought');
    const message = (await openai.chat.completions.create(chat('weather [sim replay=tool-call-chat.json]'))).choices[0]
      .message;
    check(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments);
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
  async 'clients that try again after a 429 get their answer'() {
    const limited = (name) => `again ${name} [sim fail-first=1 status=429 retry=1s]`;
    const patient = {
      openai: async (text) =>
        (
          await new OpenAI({ apiKey: 'x', baseURL: `${gateway}/v1beta/openai/`, maxRetries: 3 }).chat.completions.create({
            model,
            messages: asked(text),
          })
        ).choices[0].message.content,
      genai: async (text) =>
        (
          await new GoogleGenAI({
            apiKey: 'x',
            httpOptions: { baseUrl: gateway, retryOptions: { attempts: 4 } },
          }).models.generateContent({ model, contents: text })
        ).text,
      aisdk: async (text) => (await generateText({ model: aisdk, prompt: text, maxRetries: 3 })).text,
      'aisdk, streaming': async (text) =>
        joined(streamText({ model: aisdk, prompt: text, maxRetries: 3 }).textStream, (piece) => piece),
    };
    for (const [name, ask] of Object.entries(patient)) {
      const before = await calls();
      assert.ok((await ask(limited(name))).startsWith(`Answer to: again ${name}`), name);
      assert.equal((await calls()) - before, 2, name);
    }
    // One that does not try again. Other models: nobody is let through to one that is limited.
    const legacyPro = new GoogleGenerativeAI('x').getGenerativeModel({ model: 'gemini-2.5-pro' }, { baseUrl: gateway });
    assert.equal((await fails(legacyPro.generateContent(limited('legacy')))).status, 429);
    const lite = { model: 'gemini-2.5-flash-lite', messages: asked('no more [sim status=429 retry=1s]') };
    assert.equal((await fails(openai.chat.completions.create(lite))).headers.get('retry-after'), '1');
  },
  async 'clients that abort, or break out of their loop, leave the answer to the others'() {
    for (const [name, ask] of Object.entries(streams)) {
      const before = await calls();
      const text = `leave ${name} [sim events=8 gap=50ms]`;
      const abort = new AbortController();
      const stays = ask(text);
      // With its first words. Most clients throw then, openai ends its loop.
      const aborted = ask(text, { signal: abort.signal, enough: () => (abort.abort(), false) }).catch(() => '');
      const some = await ask(text, { enough: (read) => read.length > 0 });
      const all = await stays;
      assert.ok((await aborted).length < all.length, name);
      assert.ok(all.startsWith(`Answer to: leave ${name}`) && all.startsWith(some) && some.length < all.length, name);
      assert.equal(await ask(text), all, name);
      assert.equal((await calls()) - before, 1, name);
    }
  },
  async 'countTokens and models are passed on'() {
    assert.ok((await genai.models.countTokens({ model, contents: 'count me' })).totalTokens > 0);
    assert.equal((await genai.models.get({ model })).name, `models/${model}`);
  },
  async 'an EventSource reads a stream to its end, and asks no more'() {
    const url = await created('events [sim events=5 gap=20ms]');
    // Not closed at the end: it comes back with the last id, and is told that there is no more.
    const { ids, end, code } = await readEvents(url);
    assert.equal(code, 204);
    assert.deepEqual(ids.map((id) => id.split('.')[1]), ['1', '2', '3', '4', '5']);
    assert.equal(end.ending, 'complete');
  },
  async 'an EventSource is told of an answer that breaks off, of one that does not begin, and of none'() {
    const { ids, end, code } = await readEvents(await created('broken events [sim events=5 cut-after=2 gap=20ms]'));
    assert.equal(code, 204);
    assert.equal(ids.length, 2);
    assert.equal(end.ending, 'truncated');
    assert.equal(end.error.status, 'UNAVAILABLE');
    const refused = await readEvents(await created('no events [sim status=503]'));
    assert.equal(refused.ids.length, 0);
    assert.equal(refused.end?.error?.code ?? refused.code, 503);
    assert.equal((await readEvents(`${gateway}/v1/streams/0123456789abcdef`)).code, 404);
  },
  async 'twenty processes of nine kinds with one prompt cause one call a method'() {
    const before = await calls();
    const names = Object.keys(kinds);
    assert.equal(names.length, 9);
    const said = await Promise.all(
      Array.from({ length: 20 }, (_, i) => {
        const name = names[i % names.length];
        const child = spawn(
          process.execPath,
          [fileURLToPath(import.meta.url), gateway, sim, name, 'all of us [sim events=10 gap=30ms]'],
          { stdio: ['ignore', 'pipe', 'inherit'] },
        );
        let out = '';
        child.stdout.on('data', (piece) => (out += piece));
        return new Promise((resolve) => child.on('close', (code) => resolve({ name, code, out })));
      }),
    );
    const methodOf = (name) => (name.startsWith('openai') ? name : name.endsWith('-whole') ? 'unary' : 'stream');
    for (const { name, code, out } of said) {
      assert.equal(code, 0, name);
      assert.ok(out.startsWith('Answer to: all of us'), name);
      assert.equal(out, said.find((other) => methodOf(other.name) === methodOf(name)).out, name);
    }
    assert.equal((await calls()) - before, 4);
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
