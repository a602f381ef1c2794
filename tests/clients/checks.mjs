// Run the checks of a client, and print a line for each one, like checks.py.
import assert from 'node:assert/strict'

export const MODEL = 'tiny'
export const QUESTION = 'What is the weather in Paris?' // the model calls get_weather without being forced
export const RESULT = '12 degrees'
export const url = process.argv[2]
export { assert }

export function getWeather({ city }) {
  assert.ok(city, 'the call has no city')
  return RESULT
}

// Run all checks, an object of async functions. Exit with 1 if one has failed.
export async function run(checks) {
  let hasFailed = false
  for (const [name, check] of Object.entries(checks)) {
    const started = performance.now()
    try {
      await check()
      console.log(`${name}: passed in ${((performance.now() - started) / 1000).toFixed(1)} s`)
    } catch (error) {
      console.error(error)
      console.log(`${name}: failed`)
      hasFailed = true
    }
  }
  process.exit(hasFailed ? 1 : 0)
}
