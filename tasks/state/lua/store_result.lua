-- Stores a state of Celery's under Celery's own key, and tells its channel. As in Celery, nothing replaces a success.
-- The ledger keeps a job's result only until it stands here, and the reaper need not see to it any more.
-- KEYS: result, entry. ARGV: value, seconds to keep it or '', the job's id if this is its end, 1 if it is a success.
if ARGV[3] ~= '' then redis.call('ZREM', DUE, ARGV[3]) end
if string.find(redis.call('GETRANGE', KEYS[1], 0, 30), '^{"status": ?"SUCCESS"') then return 0 end
if ARGV[2] == '' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SETEX', KEYS[1], ARGV[2], ARGV[1]) end
redis.call('PUBLISH', KEYS[1], ARGV[1])
if ARGV[4] == '1' then redis.call('HDEL', KEYS[2], 'result') end
return 1
