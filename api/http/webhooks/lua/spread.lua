-- Turns an announced event into its deliveries, once: whoever deletes the entry makes them.
-- KEYS: stream, due. ARGV: id of the entry, prefix of deliveries, their time of life (s), id of the event, type, object;
-- then the id of each delivery, and its endpoint.
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
local now = stamp(clock())
local at_ms = string.match(ARGV[1], '^%d+') -- when it was announced
for at = 7, #ARGV, 2 do
  local key = ARGV[2] .. ARGV[at]
  if redis.call('EXISTS', key) == 0 then -- else it was announced before, and is still on its way
    redis.call('HSET', key, 'event', ARGV[4], 'type', ARGV[5], 'object', ARGV[6], 'endpoint', ARGV[at + 1],
               'created_at', string.sub(at_ms, 1, -4), 'attempts', 0)
    redis.call('EXPIRE', key, ARGV[3])
    redis.call('ZADD', KEYS[2], now, ARGV[at])
  end
end
return 1
