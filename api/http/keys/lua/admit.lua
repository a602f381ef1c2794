-- Admits a request (requests: 1), or charges its tokens and jobs (requests: 0). If a limit is reached, nothing changes.
-- KEYS: admissions, charges, jobs. ARGV: id, requests per window, tokens per window, concurrent jobs ('' for no limit), requests,
-- estimated tokens, number of jobs, window (s), lease (s), time or ''.
-- Returns: verdict, seconds until enough has left the window, requests and tokens in the window, seconds until the window is empty.
local admissions, charges, jobs = KEYS[1], KEYS[2], KEYS[3]
local id, max_requests, max_tokens, max_jobs = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local new_requests, tokens, num_jobs = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local window, lease, now = tonumber(ARGV[8]), tonumber(ARGV[9]), clock(ARGV[10])
local entry = new_requests == 1 and id or 'x' .. id
local LOOKED_AT = 200 -- bounds the cost of a rejection: beyond these entries, the wait is a time to retry, without a promise of admission

-- Returns the seconds until this many requests and tokens have left the window.
local function wait_for(requests_over, tokens_over)
  local oldest = redis.call('ZRANGE', admissions, 0, LOOKED_AT - 1, 'WITHSCORES')
  local leaves_in = window
  for at = 1, #oldest, 2 do
    leaves_in = tonumber(oldest[at + 1]) + window - now
    requests_over = requests_over - requests_of(oldest[at])
    tokens_over = tokens_over - tonumber(redis.call('HGET', charges, oldest[at]) or 0)
    if requests_over <= 0 and tokens_over <= 0 then break end
  end
  return leaves_in
end

local requests, taken = charged(admissions, charges, now, window)
redis.call('ZREMRANGEBYSCORE', jobs, '-inf', stamp(now))
local requests_over = max_requests and new_requests > 0 and requests + new_requests - max_requests or 0
local tokens_over = max_tokens and taken + tokens - max_tokens or 0
local held = 0 -- leases of this request
if max_jobs and num_jobs <= max_jobs then
  for place = 1, num_jobs do
    if redis.call('ZSCORE', jobs, lease_of(id, place)) then held = held + 1 end
  end
end
local verdict, wait = 'in', 0
if redis.call('ZSCORE', admissions, entry) then
  verdict = 'in' -- a repeated call, because the answer to the first one was lost
elseif max_tokens and tokens > max_tokens then
  verdict = 'too large'
elseif max_jobs and num_jobs > max_jobs then
  verdict = 'too many'
elseif requests_over > 0 or tokens_over > 0 then
  verdict = requests_over > 0 and 'requests' or 'tokens'
  wait = wait_for(requests_over, tokens_over)
elseif max_jobs and redis.call('ZCARD', jobs) - held + num_jobs > max_jobs then
  verdict = 'jobs'
else
  charge(admissions, charges, entry, now, window, tokens)
  requests, taken = requests + new_requests, taken + tokens
  if max_jobs then
    for place = 1, num_jobs do redis.call('ZADD', jobs, stamp(now + lease), lease_of(id, place)) end
    redis.call('EXPIRE', jobs, lease)
  end
end
local newest = redis.call('ZRANGE', admissions, -1, -1, 'WITHSCORES')[2]
local empty_in = newest and math.max(0, tonumber(newest) + window - now) or 0
return {verdict, stamp(wait), requests, taken, stamp(empty_in)}
