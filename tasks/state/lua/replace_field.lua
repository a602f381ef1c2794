-- Replaces a field of a hash, unless it has changed. KEYS: hash. ARGV: field, its value before or '', its new value.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
