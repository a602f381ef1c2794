-- Removes a queue without waiting jobs and messages from the set of queues. KEYS: its waiting jobs, its lists. ARGV: queue.
if redis.call('EXISTS', unpack(KEYS)) == 0 then redis.call('SREM', QUEUES, ARGV[1]) end
return 1
