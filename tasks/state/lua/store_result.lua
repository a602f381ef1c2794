-- Stores a state for Celery. The ledger notes the state that a job ended with.
-- KEYS: result, entry. ARGV: value, seconds to keep it or '', the state if it is the job's last one or ''.
-- Returns 0 if a success was stored before.
local result, job = unpack(KEYS)
local value, expires, last_state = unpack(ARGV)
local is_new = store_state(result, value, expires)
if is_new and last_state ~= '' and redis.call('EXISTS', job) == 1 then redis.call('HSET', job, 'stored', last_state) end
return is_new and 1 or 0
