// Vercel's AI SDK, as its users write it: generateObject with Zod schemas over four of its providers.
// `node structured_clients.mjs URL EXPRESSIONS` prints a JSON line per call, like structured_clients.py.
// EXPRESSIONS is a JSON array of Zod expressions; each becomes the property `value` of an object.
import { readFileSync } from 'node:fs'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject } from 'ai'
import { z } from 'zod'

const [url, expressions] = [process.argv[2], JSON.parse(process.argv[3])]
const versionOf = name => JSON.parse(readFileSync(`node_modules/${name}/package.json`, 'utf8')).version
const providers = [
  ['@ai-sdk/openai', 'responses', fetch => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none', fetch }).responses('tiny')],
  ['@ai-sdk/openai', 'chat', fetch => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none', fetch }).chat('tiny')],
  ['@ai-sdk/openai-compatible', 'chatModel', fetch => createOpenAICompatible({
    name: 'cellama', baseURL: `${url}/v1`, apiKey: 'none', supportsStructuredOutputs: true, fetch }).chatModel('tiny')],
  ['@ai-sdk/anthropic', 'messages', fetch => createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none', fetch })('tiny')],
]

for (const [client, how, connect] of providers) {
  for (const expression of expressions) {
    const statuses = []
    const model = connect(async (...request) => {
      const response = await fetch(...request)
      statuses.push(response.status)
      return response
    })
    let outcome = 'valid', detail = ''
    try {
      const schema = z.object({ value: new Function('z', `return ${expression}`)(z) })
      const { object } = await generateObject({ model, schema, prompt: 'Hi', maxRetries: 0, maxOutputTokens: 400 })
      schema.parse(object)
    } catch (error) {
      outcome = statuses.length === 0 ? 'refused by client' : statuses.at(-1) >= 400 ? 'refused by gateway' : 'wrong'
      detail = `${error}; ${error.cause ?? ''}; ${error.responseBody ?? error.text ?? ''}`.slice(0, 1000)
    }
    console.log(JSON.stringify({ client, version: versionOf(client), how, model: expression, outcome, detail }))
  }
}
