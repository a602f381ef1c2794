-- Celery has the end of a job, and what follows the job has been sent. KEYS: entry. ARGV: id.
if redis.call('HGET', KEYS[1], 'state') == 'done' then settle(KEYS[1], ARGV[1]) end
return 1
