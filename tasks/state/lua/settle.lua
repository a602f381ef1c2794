-- Notes that Celery has the end of a job, and that what follows the job has been sent. KEYS: entry. ARGV: id.
local job, id = KEYS[1], ARGV[1]
if redis.call('HGET', job, 'state') == 'done' then settle(job, id) end
return 1
