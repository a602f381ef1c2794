-- The job waits for its ETA, and no worker holds its message meanwhile: then `restore` puts it at the head of its queue.
-- KEYS: entry. ARGV: id, token of taking, seconds until then. A worker that does not hold the message changes nothing.
local job, id = KEYS[1], ARGV[1]
local found = redis.call('HMGET', job, 'holder', 'queue')
if found[1] ~= ARGV[2] then return 0 end
let_go(job, id)
redis.call('ZADD', DELAYED, stamp(clock() + ARGV[3]), id)
redis.call('ZREM', WAITING .. found[2], id)
return 1
