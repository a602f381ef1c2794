// Use LangChain's models with tools, streams, structured output and agents.
// `node langchain_client.mjs URL` prints one line per check.
import { ChatAnthropic } from '@langchain/anthropic'
import { HumanMessage, ToolMessage } from '@langchain/core/messages'
import { tool } from '@langchain/core/tools'
import { ChatOpenAI } from '@langchain/openai'
import { createAgent } from 'langchain'
import { z } from 'zod'
import { MODEL, QUESTION, assert, getWeather, run, url } from './checks.mjs'

const once = { model: MODEL, maxRetries: 0, maxTokens: 80, temperature: 0, apiKey: 'none' }
const configuration = { baseURL: `${url}/v1` }
const models = {
  chat: new ChatOpenAI({ ...once, configuration }),
  responses: new ChatOpenAI({ ...once, configuration, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ ...once, anthropicApiUrl: url }),
}
const City = z.object({ name: z.string().max(12), is_large: z.boolean() })
const weather = tool(getWeather, {
  name: 'get_weather', description: 'The weather in a city', schema: z.object({ city: z.string().max(12) }) })
const asked = new HumanMessage(QUESTION)
const more = new HumanMessage('And in Rome?')

async function inTwoSteps(model, ask) {
  const called = await ask(model, [asked])
  assert.ok(called.tool_calls?.length, JSON.stringify(called))
  const results = []
  for (const call of called.tool_calls) {
    results.push(new ToolMessage({ tool_call_id: call.id, content: await weather.invoke(call.args) }))
  }
  const answer = await ask(model, [asked, called, ...results])
  assert.ok(answer.text, JSON.stringify(answer))
  assert.ok(await model.invoke([asked, called, ...results, answer, more]))
}

async function streamed(model, turns) {
  let whole
  for await (const chunk of await model.stream(turns)) whole = whole === undefined ? chunk : whole.concat(chunk)
  return whole
}

const checks = {}
for (const [name, model] of Object.entries(models)) {
  const bound = model.bindTools([weather])
  checks[`${name}: tools in two steps`] = () => inTwoSteps(bound, (model, turns) => model.invoke(turns))
  checks[`${name}: streamed tools in two steps`] = () => inTwoSteps(bound, streamed)
  checks[`${name}: structured output`] = async () => {
    for (const method of ['functionCalling', 'jsonSchema']) {
      City.parse(await model.withStructuredOutput(City, { method }).invoke([asked]))
    }
  }
  checks[`${name}: agent`] = async () => {
    const agent = createAgent({ model, tools: [weather] })
    const first = await agent.invoke({ messages: [asked] })
    assert.deepEqual(first.messages.map(message => message.type), ['human', 'ai', 'tool', 'ai'])
    const again = await agent.invoke({ messages: [...first.messages, asked] })
    assert.equal(again.messages.at(-1).type, 'ai')
  }
}
await run(checks)
