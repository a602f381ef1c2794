// Use Anthropic's client with streams, tools in two steps, thinking, structured output and its tool runner.
// `node anthropic_client.mjs URL` prints one line per check.
import Anthropic from '@anthropic-ai/sdk'
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod'
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod'
import { z } from 'zod'
import { MODEL, QUESTION, RESULT, assert, getWeather, run, url } from './checks.mjs'

const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0, timeout: 60_000 })
const City = z.object({ name: z.string().max(12), is_large: z.boolean() })
const Weather = z.object({ city: z.string().max(12) })
const once = { model: MODEL, max_tokens: 80 }
const tools = [{
  name: 'get_weather',
  description: 'The weather in a city',
  input_schema: { type: 'object', properties: { city: { type: 'string', maxLength: 12 } }, required: ['city'] },
}]
const asked = { role: 'user', content: QUESTION }
const more = { role: 'user', content: 'And in Rome?' }

function turnsAfter({ content }) {
  const calls = content.filter(block => block.type === 'tool_use')
  assert.ok(calls.length, JSON.stringify(content))
  for (const call of calls) assert.ok(Weather.parse(call.input))
  const results = calls.map(call => ({ type: 'tool_result', tool_use_id: call.id, content: RESULT }))
  return [{ role: 'assistant', content }, { role: 'user', content: results }]
}

await run({
  'tool call': async () => {
    const messages = [asked, ...turnsAfter(await client.messages.create({ ...once, messages: [asked], tools }))]
    const answer = await client.messages.create({ ...once, messages, tools })
    assert.ok(answer.content.length)
    const back = [...messages, { role: 'assistant', content: answer.content }, more]
    assert.ok((await client.messages.create({ ...once, messages: back, tools })).content.length)
  },
  'streamed tool call': async () => {
    const inputs = []
    const stream = client.messages.stream({ ...once, messages: [asked], tools })
    stream.on('inputJson', part => inputs.push(part))
    const messages = [asked, ...turnsAfter(await stream.finalMessage())]
    assert.ok(inputs.length)
    const second = client.messages.stream({ ...once, messages, tools })
    let text = ''
    second.on('text', delta => { text += delta })
    assert.equal(await second.finalText(), text)
    const back = [...messages, { role: 'assistant', content: (await second.finalMessage()).content }, more]
    assert.ok((await client.messages.create({ ...once, messages: back, tools })).content.length)
  },
  'thinking': async () => {
    const thinking = { type: 'enabled', budget_tokens: 1024 }
    const first = await client.messages.stream({ ...once, max_tokens: 1100, messages: [asked], thinking }).finalMessage()
    assert.equal(first.content[0].type, 'thinking')
    const messages = [asked, { role: 'assistant', content: first.content }, more]
    assert.ok((await client.messages.create({ ...once, max_tokens: 1100, messages, thinking })).content.length)
  },
  'parsed object': async () => {
    const format = zodOutputFormat(City)
    const parsed = await client.messages.parse({ ...once, messages: [asked], output_config: { format } })
    City.parse(parsed.parsed_output)
    const messages = [asked, { role: 'assistant', content: parsed.content }, more]
    City.parse((await client.messages.parse({ ...once, messages, output_config: { format } })).parsed_output)
  },
  'tool runner': async () => {
    const tool = betaZodTool({ name: 'get_weather', description: 'The weather', inputSchema: Weather, run: getWeather })
    const runner = client.beta.messages.toolRunner({ ...once, messages: [asked], tools: [tool], max_iterations: 3 })
    const kinds = []
    for await (const message of runner) kinds.push(message.stop_reason)
    assert.deepEqual(kinds, ['tool_use', 'end_turn'])
  },
  'streamed tool runner': async () => {
    const tool = betaZodTool({ name: 'get_weather', description: 'The weather', inputSchema: Weather, run: getWeather })
    const runner = client.beta.messages.toolRunner({
      ...once, messages: [asked], tools: [tool], max_iterations: 3, stream: true })
    const kinds = []
    for await (const stream of runner) kinds.push((await stream.finalMessage()).stop_reason)
    assert.deepEqual(kinds, ['tool_use', 'end_turn'])
  },
  'count of tokens': async () => {
    const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: [asked], tools })
    const { usage } = await client.messages.create({ ...once, messages: [asked], tools })
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens)
  },
})
