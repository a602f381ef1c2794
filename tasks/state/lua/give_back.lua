-- The message goes to the head of its queue. Who does not hold it any more changes nothing.
-- KEYS: entry, cancel. ARGV: id, token of taking.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[2] then return 0 end
give_back(KEYS[1], KEYS[2], ARGV[1])
return 1
