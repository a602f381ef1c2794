-- Stores a state of Celery's. The ledger keeps a job's result only until it stands here, and the reaper need not see to it
-- any more.
-- KEYS: result, entry. ARGV: value, seconds to keep it or '', the job's id if this is its end, 1 if it is a success.
if ARGV[3] ~= '' then redis.call('ZREM', DUE, ARGV[3]) end
if not tell_celery(KEYS[1], ARGV[1], ARGV[2]) then return 0 end
if ARGV[4] == '1' then redis.call('HDEL', KEYS[2], 'result') end
return 1
