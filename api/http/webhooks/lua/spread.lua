-- Turns an announced event into deliveries, once: only the call that deletes the entry makes them.
-- KEYS: stream, due. ARGV: id of the entry, prefix of deliveries, their TTL (s), id of the event, its type, its object;
-- then the id and the endpoint of each delivery.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
local now = stamp(clock())
local at_ms = string.match(ARGV[1], '^%d+') -- when it was announced
for at = 7, #ARGV, 2 do
  local key = ARGV[2] .. ARGV[at]
  if redis.call('EXISTS', key) == 0 then -- else the event was announced before, and its delivery has not ended
    redis.call('HSET', key, 'event', ARGV[4], 'type', ARGV[5], 'object', ARGV[6], 'endpoint', ARGV[at + 1],
               'created_at', string.sub(at_ms, 1, -4), 'attempts', 0)
    redis.call('EXPIRE', key, ARGV[3])
    redis.call('ZADD', KEYS[2], now, ARGV[at])
  end
end
return 1
