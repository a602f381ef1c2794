-- Stores a state for Celery. The ledger notes the state that a job ended with.
-- KEYS: result, entry. ARGV: value, seconds to keep it or '', the state if it is the job's last one, else ''.
local is_new = tell_celery(KEYS[1], ARGV[1], ARGV[2])
if is_new and ARGV[3] ~= '' and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'stored', ARGV[3]) end
return is_new and 1 or 0
