-- A delivery is over, or due again later; nothing, if another gateway has it by now.
-- KEYS: due, delivery. ARGV: its id, token, seconds until it is tried again, or ''.
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
else
  redis.call('HDEL', KEYS[2], 'token')
  redis.call('ZADD', KEYS[1], stamp(clock() + ARGV[3]), ARGV[1])
end
return 1
