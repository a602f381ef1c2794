-- A queue in which no job waits is not looked at. KEYS: its waiting jobs. ARGV: queue.
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', QUEUES, ARGV[1]) end
return 1
