-- A job whose message is neither in its queue nor held. Missing for a whole period it is lost, and queued again.
-- KEYS: entry, cancel. ARGV: id, period in seconds, the set that knows of it. Returns 1 if it was queued again.
local job, id, now = KEYS[1], ARGV[1], clock()
local state = redis.call('HGET', job, 'state')
if not state or state == 'done' then -- evicted by Redis, or deleted by hand: there is nothing to queue again
  redis.call('ZREM', ARGV[3], id)
  redis.call('ZREM', RUNNING, id)
  redis.call('ZREM', MISSING, id)
  return 0
end
if redis.call('ZSCORE', LEASES, id) then return 0 end
local since = redis.call('ZSCORE', MISSING, id)
if not since then
  redis.call('ZADD', MISSING, stamp(now), id)
  return 0
end
if now - tonumber(since) < tonumber(ARGV[2]) then return 0 end
redis.call('ZREM', MISSING, id)
return give_back(job, KEYS[2], id) and 1 or 0
