// Send what parse(), stream() and runTools() of OpenAI's client return back to the gateway, as its users do.
// `node openai_client.mjs URL` prints one line per check.
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { MODEL, QUESTION, RESULT, assert, getWeather, run, url } from './checks.mjs'

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: 60_000 })
const City = z.object({ name: z.string().max(12), is_large: z.boolean() })
const Weather = z.object({ city: z.string().max(12) })
const chat = { model: MODEL, temperature: 0, max_tokens: 80 }
const response = { model: MODEL, temperature: 0, max_output_tokens: 80 }
const tools = [zodFunction({ name: 'get_weather', parameters: Weather })]
const responseTools = [zodResponsesFunction({ name: 'get_weather', parameters: Weather })]
const asked = { role: 'user', content: QUESTION }
const more = { role: 'user', content: 'And in Rome?' }

function resultsOf(message) {
  assert.ok(message.tool_calls?.length, JSON.stringify(message))
  for (const call of message.tool_calls) assert.ok(Weather.parse(call.function.parsed_arguments))
  return message.tool_calls.map(call => ({ role: 'tool', tool_call_id: call.id, content: RESULT }))
}

function outputsOf({ output }) {
  const calls = output.filter(item => item.type === 'function_call')
  assert.ok(calls.length, JSON.stringify(output))
  for (const call of calls) assert.ok(Weather.parse(call.parsed_arguments))
  return calls.map(call => ({ type: 'function_call_output', call_id: call.call_id, output: RESULT }))
}

function runnableTools() {
  return [zodFunction({ name: 'get_weather', parameters: Weather, function: getWeather })]
}

await run({
  'parsed object': async () => {
    const messages = [asked]
    for (let turn = 0; turn < 2; turn++) {
      const parsed = await client.chat.completions.parse({
        ...chat, messages, response_format: zodResponseFormat(City, 'city') })
      const { message } = parsed.choices[0]
      City.parse(message.parsed)
      messages.push(message, more)
    }
  },
  'parsed tool call': async () => {
    const { message } = (await client.chat.completions.parse({ ...chat, messages: [asked], tools })).choices[0]
    const messages = [asked, message, ...resultsOf(message)]
    const answer = (await client.chat.completions.parse({ ...chat, messages, tools })).choices[0].message
    assert.ok(answer.content)
    const again = await client.chat.completions.parse({
      ...chat, messages: [...messages, answer, more], tools, tool_choice: 'required' })
    resultsOf(again.choices[0].message)
  },
  'streamed tool call': async () => {
    const kinds = new Set()
    const stream = client.chat.completions.stream({ ...chat, messages: [asked], tools })
    stream.on('tool_calls.function.arguments.done', () => kinds.add('arguments'))
    const { message } = (await stream.finalChatCompletion()).choices[0]
    assert.ok(kinds.has('arguments'))
    const messages = [asked, message, ...resultsOf(message)]
    const second = client.chat.completions.stream({ ...chat, messages, tools })
    let text = ''
    second.on('content', delta => { text += delta })
    const answer = await second.finalMessage()
    assert.ok(answer.content)
    assert.equal(answer.content, text)
    assert.ok((await client.chat.completions.create({ ...chat, messages: [...messages, answer, more], tools })).choices)
  },
  'streamed object': async () => {
    const stream = client.chat.completions.stream({
      ...chat, messages: [asked], response_format: zodResponseFormat(City, 'city') })
    const { message } = (await stream.finalChatCompletion()).choices[0]
    City.parse(message.parsed)
    const again = await client.chat.completions.create({ ...chat, messages: [asked, message, more] })
    assert.ok(again.choices[0].message.content)
  },
  'runTools': async () => {
    const runner = client.chat.completions.runTools({ ...chat, messages: [asked], tools: runnableTools() })
    assert.ok(await runner.finalContent())
    assert.deepEqual(runner.messages.map(message => message.role), ['user', 'assistant', 'tool', 'assistant'])
  },
  'streamed runTools': async () => {
    const runner = client.chat.completions.runTools({
      ...chat, stream: true, messages: [asked], tools: runnableTools() })
    assert.ok(await runner.finalContent())
    assert.deepEqual(runner.messages.map(message => message.role), ['user', 'assistant', 'tool', 'assistant'])
    const messages = [...runner.messages, more]
    assert.ok((await client.chat.completions.create({ ...chat, messages, tools })).choices)
  },
  'responses: parsed object': async () => {
    const input = [asked]
    for (let turn = 0; turn < 2; turn++) {
      const parsed = await client.responses.parse({
        ...response, input, text: { format: zodTextFormat(City, 'city') } })
      City.parse(parsed.output_parsed)
      input.push(...parsed.output, more)
    }
  },
  'responses: parsed tool call': async () => {
    const first = await client.responses.parse({ ...response, input: [asked], tools: responseTools })
    const input = [asked, ...first.output, ...outputsOf(first)]
    const answer = await client.responses.parse({ ...response, input, tools: responseTools })
    assert.ok(answer.output_text)
    const following = await client.responses.parse({
      ...response, input: outputsOf(first), previous_response_id: first.id, tools: responseTools })
    assert.equal(following.output_text, answer.output_text)
  },
  'responses: streamed tool call': async () => {
    const kinds = new Set()
    const stream = client.responses.stream({ ...response, input: [asked], tools: responseTools })
    for await (const event of stream) kinds.add(event.type)
    assert.ok(kinds.has('response.function_call_arguments.done'))
    const first = await stream.finalResponse()
    const input = [asked, ...first.output, ...outputsOf(first)]
    const second = await client.responses.stream({ ...response, input, tools: responseTools }).finalResponse()
    assert.ok(second.output_text)
  },
  'responses: streamed object': async () => {
    const stream = client.responses.stream({
      ...response, input: [asked], text: { format: zodTextFormat(City, 'city') } })
    const parsed = await stream.finalResponse()
    City.parse(parsed.output_parsed)
    const again = await client.responses.create({ ...response, input: [asked, ...parsed.output, more] })
    assert.ok(again.output_text)
  },
})
