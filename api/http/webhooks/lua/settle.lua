-- Ends a delivery, or schedules its next attempt. Does nothing if another gateway holds its lease by now.
-- KEYS: due, delivery. ARGV: id of the delivery, token, seconds until the next attempt, or ''.
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
else
  redis.call('HDEL', KEYS[2], 'token')
  redis.call('ZADD', KEYS[1], stamp(clock() + ARGV[3]), ARGV[1])
end
return 1
