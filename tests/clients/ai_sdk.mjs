// Use Vercel's AI SDK with tools in several steps, streams and structured output over its providers.
// `node ai_sdk.mjs URL` prints one line per check.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import * as ai from 'ai'
import { z } from 'zod'
import { MODEL, QUESTION, assert, getWeather, run, url } from './checks.mjs'

const at = { baseURL: `${url}/v1`, apiKey: 'none' }
const providers = {
  responses: createOpenAI(at).responses(MODEL),
  chat: createOpenAI(at).chat(MODEL),
  compatible: createOpenAICompatible({ ...at, name: 'cellama', supportsStructuredOutputs: true }).chatModel(MODEL),
  anthropic: createAnthropic(at)(MODEL),
}
const City = z.object({ name: z.string().max(12), is_large: z.boolean() })
const weather = ai.tool({
  description: 'The weather in a city',
  inputSchema: z.object({ city: z.string().max(12) }),
  execute: getWeather,
})
const stopWhen = (ai.isStepCount ?? ai.stepCountIs)(4) // the name changed in version 7
const once = { maxRetries: 0, maxOutputTokens: 80, temperature: 0 }
const asked = { role: 'user', content: QUESTION }
const more = { role: 'user', content: 'And in Rome?' }

const checks = {}
for (const [name, model] of Object.entries(providers)) {
  checks[`${name}: tools in two steps`] = async () => {
    const options = { ...once, model, tools: { get_weather: weather }, stopWhen }
    const first = await ai.generateText({ ...options, messages: [asked] })
    assert.deepEqual(first.steps.map(step => step.finishReason), ['tool-calls', 'stop'])
    assert.ok(first.text)
    const messages = [asked, ...first.response.messages, more]
    assert.ok((await ai.generateText({ ...options, messages })).steps.length)
  }
  checks[`${name}: streamed tools in two steps`] = async () => {
    const options = { ...once, model, tools: { get_weather: weather }, stopWhen, onError: () => {} }
    const first = ai.streamText({ ...options, messages: [asked] })
    let text = ''
    for await (const delta of first.textStream) text += delta
    assert.deepEqual((await first.steps).map(step => step.finishReason), ['tool-calls', 'stop'])
    assert.ok(text)
    const messages = [asked, ...(await first.response).messages, more]
    const second = ai.streamText({ ...options, messages })
    await second.consumeStream()
    assert.ok((await second.steps).length)
  }
  checks[`${name}: object`] = async () => {
    const output = ai.Output.object({ schema: City })
    const first = await ai.generateText({ ...once, model, output, messages: [asked] })
    City.parse(first.output)
    const messages = [asked, ...first.response.messages, more]
    assert.ok((await ai.generateText({ ...once, model, messages })).text)
  }
  checks[`${name}: streamed object`] = async () => {
    const output = ai.Output.object({ schema: City })
    const result = ai.streamText({ ...once, model, output, messages: [asked] })
    await result.consumeStream()
    City.parse(await result.output)
  }
}
await run(checks)
