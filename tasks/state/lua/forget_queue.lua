-- A queue without waiting jobs and messages is not looked at any more. KEYS: its waiting jobs, its lists. ARGV: queue.
if redis.call('EXISTS', unpack(KEYS)) == 0 then redis.call('SREM', QUEUES, ARGV[1]) end
return 1
