-- Queues a job again whose message has been neither in its queue nor held for a whole period: Redis has lost it.
-- KEYS: entry, cancel. ARGV: id, period in seconds, the set that knows of the job. Returns 1 if it was queued again.
local job, cancel = unpack(KEYS)
local id, period_s, known_by = unpack(ARGV)
local now, state = clock(), redis.call('HGET', job, 'state')
if not state or state == 'done' then -- evicted by Redis, or deleted by hand: there is nothing to queue again
  redis.call('ZREM', known_by, id)
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
if now - tonumber(since) < tonumber(period_s) then return 0 end
redis.call('ZREM', MISSING, id)
return requeue(job, cancel, id) and 1 or 0
