-- A worker has taken a message from its queue, and holds it from now on, unless the answer says otherwise.
-- KEYS: entry. ARGV: id, token of this taking, lease in seconds. Returns verdict, seconds since it was submitted or ''.
local job, id, token, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local found = redis.call('HMGET', job, 'state', 'holder', 'submitted_at')
local state, holder = found[1], found[2]
if not state then return {'gone', ''} end -- an entry stays as long as its job has not ended
local waited = stamp(math.max(0, clock() - tonumber(found[3])))
if state == 'done' then return {'done', waited} end
if holder and holder ~= token then
  local ends_at = redis.call('ZSCORE', LEASES, id)
  if ends_at and tonumber(ends_at) > clock() then return {'copy', waited} end
end
redis.call('HSET', job, 'holder', token)
redis.call('ZADD', LEASES, stamp(clock() + lease), id)
redis.call('ZREM', MISSING, id)
return {'held', waited}
