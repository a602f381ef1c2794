-- The scripts of the ledger. Each script is one atomic step, and starts with a line `--@ name`. The order is that of a job's
-- life: submission, messages, attempts, the end, and lost messages. The functions before the first script belong to all scripts.
-- docs/delivery.md explains the states of a job, and contract/keys.py lists the keys.
--
-- Python inserts constants (scripts.py: `_constants`) and adds the functions `clock` and `stamp` (connection/connections.py). WAITING,
-- BACKLOG, SHARES, IDLE, COSTS, SLOTS, BLOCKED, HELD, BUSY, JOB, CANCEL, RESULT, JOURNAL, HEEDED, CONTEXT and CHORD are prefixes of keys.
-- QUEUES, RUNNING, DELAYED, DUE, LEASES, MISSING, SHORTAGES, TERMS, LIMITED, HOLDERS, OLD_HOLDERS, SERVED, DEAD, ENDED and ENDS
-- are keys. SUBMITTED_AT_HEADER and WEIGHT_HEADER are names of message headers.

-- Returns the job id of a message, which is in its properties. The headers before the properties can contain the same names,
-- because users choose headers. The plain search is much faster than a pattern. It finds messages that Python has written.
local function id_of(message)
  local at = 0
  local following = string.find(message, '"properties": {', 1, true)
  while following do
    at, following = following, string.find(message, '"properties": {', following + 1, true)
  end
  if at == 0 then return string.match(message, '.*"properties": *{.-"correlation_id": *"([^"]+)"') end
  return string.match(message, '"correlation_id": ?"([^"]+)"', at)
end

-- Tickets and backlogs
--
-- A message of cellama in a Redis list is a ticket: it stands for any job that waits in this list. A worker that pops a ticket
-- gets the next job of the list's backlog, whose message is in its entry. The ticket of that job remains in the list, and later
-- stands for another job. So the length of a list is the number of its waiting jobs, and the order of the list has no effect.
-- A backlog has the jobs that no worker holds. Messages of plain Celery are not tickets.

-- Returns the job id in a ticket, or nil if the message is not a ticket.
local function ticket_id(message)
  return string.find(message, '"' .. SUBMITTED_AT_HEADER .. '"', 1, true) and id_of(message) or nil
end

-- Fair shares
--
-- The next job of a list belongs to the fairness key with the least service. Keys form a tree: below the root '' are keys such as
-- `acme`, and nodes such as `org/`, whose keys and nodes start with `org/`. The jobs of the key `org` itself belong to a child of
-- `org/`, if this node exists. From the root, the choice continues with the child with the least service per weight, until it is a
-- key. SHARES contains the children with jobs in the backlog, by service per weight. IDLE contains the names of the other children,
-- without the last slash, in the same way. Its member '/' has the service of the last child that left SHARES empty. This is VTC
-- (arXiv 2401.00588) with a tree. A child that may have no more jobs at the same time has the score 'inf' in SHARES, and its service
-- in IDLE.

local function children(node, list) return SHARES .. list .. '\0' .. node end
local function idle_children(node, list) return IDLE .. list .. '\0' .. node end

-- Returns the names of the levels of a key, such as `org` and `org/team` for `org/team`. The empty key has one level.
local function levels_of(key)
  local levels = {}
  for at in string.gmatch(key .. '/', '()/') do levels[#levels+1] = string.sub(key, 1, at - 1) end
  return levels
end

-- Adds a child to a node. A child that returns gets at least the least service of the others, so that it can't catch up on the time
-- when it had no jobs. If it `was_next`, it may be the next one again.
local function add_child(node, name, child, list, was_next)
  local active, idle = children(node, list), idle_children(node, list)
  local own, last = unpack(redis.call('ZMSCORE', idle, name, '/'), 1, 2)
  local least = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')[2]
  least = tonumber(least and least ~= 'inf' and least or last or 0)
  redis.call('ZADD', active, math.max(was_next and least - 1 or least, tonumber(own or least)), child)
  if own then redis.call('ZREM', idle, name) end
end

-- Adds a key to the tree, because it has a job in the backlog.
local function activate(key, list)
  local node, levels = '', levels_of(key)
  for i, name in ipairs(levels) do
    local active, inner = children(node, list), name .. '/'
    local of_key, of_node = unpack(redis.call('ZMSCORE', active, name, inner), 1, 2)
    if i == #levels and not of_node then
      if not of_key then add_child(node, name, name, list) end
      return
    elseif of_key then -- the key becomes a node, with its jobs as a child
      redis.call('ZREM', active, name)
      redis.call('ZADD', active, of_key, inner)
      add_child(inner, name, name, list)
    elseif not of_node or of_node == 'inf' then -- the node may be blocked only because its other children are
      add_child(node, name, inner, list, of_node)
    end
    node = inner
  end
  if not redis.call('ZSCORE', children(node, list), key) then add_child(node, key, key, list) end
end

-- Remembers the service of a child that is idle or blocked.
local MAX_IDLE = 10000 -- children whose service is remembered, which take about 1 MB for each node
local IDLE_S = 86400
local function remember(node, name, service, list)
  local idle = idle_children(node, list)
  redis.call('ZADD', idle, service, name)
  redis.call('ZREMRANGEBYRANK', idle, 0, -MAX_IDLE - 1)
  redis.call('EXPIRE', idle, IDLE_S)
end

-- Removes a key from the tree, because it has no job in the backlog.
local function deactivate(key, list)
  local levels, child = levels_of(key), key
  for i = #levels + 1, 1, -1 do
    local node = i > 1 and levels[i-1] .. '/' or ''
    local active = children(node, list)
    local service = redis.call('ZSCORE', active, child)
    if service then
      redis.call('ZREM', active, child)
      if service ~= 'inf' then remember(node, levels[i] or key, service, list) end
      if redis.call('EXISTS', active) == 1 then return end
      if service ~= 'inf' then remember(node, '/', service, list) end
      child = node
    elseif i <= #levels then -- else the key has no node
      return
    end
  end
end

-- Blocks a child of a node, because it may have no more jobs at the same time.
local function block_child(node, name, child, list)
  local service = redis.call('ZSCORE', children(node, list), child)
  if not service or service == 'inf' then return end
  redis.call('ZADD', children(node, list), 'inf', child)
  remember(node, name, service, list)
  remember(node, '/', service, list)
end

-- Returns the key that is served next, and its path: pairs of a node and its child. Returns nil if the list has no jobs. Blocked keys
-- are only served if they are `included`.
local function next_key(list, included)
  local node, path = '', {}
  while true do
    local child, service = unpack(redis.call('ZRANGE', children(node, list), 0, 0, 'WITHSCORES'), 1, 2)
    local is_blocked = service == 'inf' and not included
    if child and not is_blocked then
      path[#path+1] = {node, child}
      if string.sub(child, -1) ~= '/' then return child, path end
      node = child
    elseif node == '' then
      return nil
    else -- all children of this node are blocked, or Redis has evicted them
      local parent = path[#path][1]
      if is_blocked then block_child(parent, string.sub(node, 1, -2), node, list) else redis.call('ZREM', children(parent, list), node) end
      node, path = '', {}
    end
  end
end

-- Adds service in tokens to all levels of a key. `weights` has the weight of each level.
local function add_service(key, list, tokens, weights)
  local levels, node = levels_of(key), ''
  levels[#levels+1] = key -- as a child of its own node
  for i, name in ipairs(levels) do
    local active, inner, added = children(node, list), name .. '/', tokens / (weights[i] or 1)
    local of_key = redis.call('ZADD', active, 'XX', 'INCR', added, name)
    if of_key and of_key ~= 'inf' then return end
    local of_node = not of_key and redis.call('ZADD', active, 'XX', 'INCR', added, inner)
    if not of_node or of_node == 'inf' then redis.call('ZADD', idle_children(node, list), 'XX', 'INCR', added, name) end
    node = inner
  end
end

-- Returns the expected cost of a job in tokens, from its work and the mean cost of such work for this key, or else for the list. It is
-- at most the largest recent cost of such a job in the list, and 1 before the first job has ended. Otherwise keys that return would be
-- lifted to a service that was never received, and would stay behind after its correction.
local costs_in_call = {} -- that this call has read
local function expected_cost(work, key, list)
  local kind, num_units = string.match(work or '', '^(%S+) (%d+)')
  if not kind then return 1 end
  local of_key = key .. '\0' .. kind
  local read_before = list .. '\0' .. of_key
  local costs = costs_in_call[read_before] or redis.call('HMGET', COSTS .. list, of_key, '/\0' .. kind, '//\0' .. kind)
  costs_in_call[read_before] = costs
  if not costs[3] then return 1 end
  return math.min(tonumber(num_units) * tonumber(costs[1] or costs[2] or 1), tonumber(costs[3]))
end

-- Includes the cost of a job in the mean cost of such work for its key and for its list, and in the largest recent cost. `learnt` has
-- the costs that this call has changed, by list and field. `store_learnt` must follow.
local MAX_COSTS = 20000
local DECAY = 0.99 -- of the largest cost with each job, so that a rare job does not count for long
local function learn_cost(learnt, work, key, list, cost)
  local kind, num_units = string.match(work or '', '^(%S+) (%d+)')
  if not kind then return end
  local of_unit, fields = cost / tonumber(num_units), {'//\0' .. kind, key .. '\0' .. kind, '/\0' .. kind}
  local costs = learnt[list] or {}
  learnt[list] = costs
  if not (costs[fields[1]] and costs[fields[2]]) then
    local stored = redis.call('HMGET', COSTS .. list, unpack(fields))
    for i, field in ipairs(fields) do costs[field] = costs[field] or tonumber(stored[i]) end
  end
  costs[fields[1]] = math.max(cost, DECAY * (costs[fields[1]] or 0))
  for i = 2, 3 do
    local before = costs[fields[i]]
    if before or redis.call('HLEN', COSTS .. list) < MAX_COSTS then
      costs[fields[i]] = before and 0.8 * before + 0.2 * of_unit or of_unit
    end
  end
end

-- Stores the costs that this call has learnt.
local function store_learnt(learnt)
  for list, costs in pairs(learnt) do
    local values = {}
    for field, cost in pairs(costs) do values[#values+1], values[#values+2] = field, string.format('%.6g', cost) end
    redis.call('HSET', COSTS .. list, unpack(values))
    redis.call('EXPIRE', COSTS .. list, IDLE_S)
  end
end

-- Returns the terms of the jobs of a key in a queue: the weights of the levels of the key, and the limits that apply to these jobs,
-- as pairs of a name and a number of jobs. `given` are the weights and limits of the worker's settings. TERMS replaces them. Its
-- fields are the levels for weights, and '\0' and the name for limits. The name of a queue is '/' and the queue.
local terms_in_call = {} -- that this call has read
local function terms_of(key, queue, given)
  local read_before = key .. '\0' .. queue
  if terms_in_call[read_before] then return terms_in_call[read_before] end
  local names, fields, weights, limits = levels_of(key), {}, {}, {}
  local num_levels = #names
  names[num_levels+1] = '/' .. queue
  for i, name in ipairs(names) do fields[2*i-1], fields[2*i] = name, '\0' .. name end
  local found = redis.call('HMGET', TERMS, unpack(fields))
  for i, name in ipairs(names) do
    local limit = tonumber(found[2*i] or given.limits[name] or 0)
    if limit > 0 then limits[#limits+1] = {name, limit} end
    if i <= num_levels then weights[i] = tonumber(found[2*i-1] or given.weights[name] or 1) end
  end
  terms_in_call[read_before] = {weights = weights, limits = limits}
  return terms_in_call[read_before]
end

-- Charges the key of a job that a worker takes. Returns the charge for the entry: the tokens, and the weight of each level.
local function charge(job)
  local tokens = expected_cost(job.work, job.key, job.list)
  for i, step in ipairs(job.path) do
    redis.call('ZINCRBY', children(step[1], job.list), tokens / (job.terms.weights[i] or 1), step[2])
  end
  return string.format('%.6g ', tokens) .. table.concat(job.terms.weights, ' ')
end

-- Returns the tokens of a charge, and the weight of each level.
local function parts_of_charge(charged)
  local weights = {}
  for value in string.gmatch(charged, '%S+') do weights[#weights+1] = tonumber(value) end
  return table.remove(weights, 1), weights
end

-- Returns the charge of a job (these fields of its entry) to its key, because the job waits again.
local function return_charge(job, charged, list, key)
  if not charged then return end
  local tokens, weights = parts_of_charge(charged)
  add_service(key or '', list, -tokens, weights)
  redis.call('HDEL', job, 'charged')
end

-- Replaces the charge of a job that has ended with its cost in tokens, and learns the cost. `ended` has the differences for all jobs
-- with the same key and weights in a list, which this call adds at once. `add_costs` must follow.
local function replace_charge(ended, charged, list, key, work, cost)
  local tokens, weights = parts_of_charge(charged)
  local same = table.concat({list, key, unpack(weights)}, '\0')
  ended.differences[same] = ended.differences[same] or {key = key, list = list, tokens = 0, weights = weights}
  ended.differences[same].tokens = ended.differences[same].tokens + cost - tokens
  if cost > 0 then learn_cost(ended.learnt, work, key, list, cost) end
end

local function add_costs(ended)
  for _, row in pairs(ended.differences) do add_service(row.key, row.list, row.tokens, row.weights) end
  store_learnt(ended.learnt)
end

-- Backlogs
--
-- The members of a backlog consist of the fairness key, the time of submission and the id of a job, so that their order is that of
-- the keys, then that of the submissions.

local PLACE = 17 -- characters of the time
local function member_of(id, key, submitted_at)
  return key .. '\0' .. string.format('%0' .. PLACE .. '.6f', submitted_at) .. id
end

-- Returns the id in a member of a backlog.
local function id_in(member)
  return string.sub(member, string.find(member, '\0', 1, true) + PLACE + 1)
end

-- Returns the first members of a key in the backlog of a list, at most two.
local function first_of_key(key, list)
  return redis.call('ZRANGEBYLEX', BACKLOG .. list, '[' .. key .. '\0', '(' .. key .. '\1', 'LIMIT', 0, 2)
end

-- Adds a job to the backlog of its list. The caller pushes a ticket.
local function add_to_backlog(id, list, key, submitted_at)
  redis.call('ZADD', BACKLOG .. list, 0, member_of(id, key, submitted_at))
  activate(key, list)
end

-- Removes a job from the backlog of its list. Returns whether the job was there.
local function leave_backlog(id)
  local list, submitted_at, key = unpack(redis.call('HMGET', JOB .. id, 'list', 'submitted_at', 'fairness_key'), 1, 3)
  key = key or ''
  if not list or redis.call('ZREM', BACKLOG .. list, member_of(id, key, submitted_at)) == 0 then return false end
  if #first_of_key(key, list) == 0 then deactivate(key, list) end
  return true
end

-- Returns whether a worker can take a job, given these fields of its entry: it has neither ended nor started, no worker holds it,
-- and Celery has not refused it.
local function can_be_taken(state, holder, refused)
  return (state == 'queued' or state == 'handed_back') and not holder and not refused
end

-- Adds a job to its backlog if a worker can take it. It is missing there if a worker of a version without backlogs has queued it
-- or returned it, or if a purge has removed it and could not end it. With `repairs`, its key is added to the tree if it is missing
-- there, because Redis has evicted a part of the tree. Returns whether the job was added, or nil if it has no entry.
local function restore_to_backlog(id, repairs)
  local found = redis.call('HMGET', JOB .. id, 'state', 'holder', 'refused', 'list', 'submitted_at', 'fairness_key')
  local list, submitted_at, key = found[4], found[5], found[6] or ''
  if not found[1] then return nil end
  if not list or not can_be_taken(unpack(found, 1, 3)) then return false end
  if redis.call('ZSCORE', BACKLOG .. list, member_of(id, key, submitted_at)) then
    if repairs then activate(key, list) end
    return false
  end
  if redis.call('ZSCORE', DELAYED, id) then return false end
  if redis.call('HSTRLEN', JOB .. id, 'message') == 0 then return false end -- a step of a canvas that ends without running
  add_to_backlog(id, list, key, submitted_at)
  return true
end

-- Prefixes
--
-- The entry of a job has hashes of growing prefixes of its prompt (contract/prefixes.py). A worker that takes a job will hold these
-- prefixes in its cache, and prefers jobs whose prefix it holds. A cache is {worker, bytes, bytes_per_s}: the worker's name, the
-- size of its cache in bytes of prompts, and its prefill rate. HELD contains the hashes that a worker holds. The score of '' is the
-- number of bytes that the worker has taken and not found in its cache. The score of a hash is this number at the last use of the
-- prefix, minus the length of the prefix. So in an LRU cache, the prefix is evicted when its score is less than the score of '' by
-- more than the size of the cache. HOLDERS contains the worker that took a hash last. When it is full, it becomes OLD_HOLDERS.

local HASH = 16 -- characters
local MAX_HELD = 20000 -- hashes of a worker, which take about 2 MB
local MAX_HOLDERS = 50000 -- hashes, which take about 5 MB

local function hashes_in(text)
  local hashes = {}
  for at = 1, #text, HASH do hashes[#hashes+1] = string.sub(text, at, at + HASH - 1) end
  return hashes
end

-- Returns the bytes of the prefix with this hash.
local function bytes_of(hash) return hash and tonumber(string.sub(hash, 1, 4), 16) * 64 or 0 end

-- Records that a worker holds these prefixes, of which it has to compute `num_new` bytes. The sets are trimmed once per call.
local trimmed = {} -- workers in this call
local function hold_prefixes(worker, hashes, num_new)
  local held = HELD .. worker
  local num_taken = redis.call('ZINCRBY', held, num_new, '')
  for _, hash in ipairs(hashes) do
    redis.call('ZADD', held, num_taken - bytes_of(hash), hash)
    redis.call('HSET', HOLDERS, hash, worker)
  end
  if not trimmed[worker] then
    trimmed[worker] = true
    redis.call('ZREMRANGEBYRANK', held, 0, -MAX_HELD - 1)
    redis.call('EXPIRE', held, CACHE_TTL_S)
    redis.call('EXPIRE', HOLDERS, IDLE_S)
    if redis.call('HLEN', HOLDERS) > MAX_HOLDERS then redis.call('RENAME', HOLDERS, OLD_HOLDERS) end
  end
  return tonumber(num_taken)
end

-- Records that a worker holds the prefixes of a job that it takes, and for how long it will prefill this prompt.
local function hold_prefixes_of(job)
  local cache, hashes, own = job.cache, hashes_in(job.prefixes), 0
  local held, busy, now = HELD .. cache.worker, BUSY .. job.list, clock()
  local scores = redis.call('ZMSCORE', held, unpack(hashes))
  for i, hash in ipairs(hashes) do
    if scores[i] then own = bytes_of(hash) end
  end
  local num_new = bytes_of(hashes[#hashes]) - own
  local num_taken = hold_prefixes(cache.worker, hashes, num_new)
  redis.call('ZREMRANGEBYSCORE', held, '-inf', '(' .. num_taken - cache.bytes)
  local until_now = tonumber(redis.call('ZSCORE', busy, cache.worker) or 0)
  redis.call('ZADD', busy, stamp(math.max(now, until_now) + num_new / cache.bytes_per_s), cache.worker)
  redis.call('EXPIRE', busy, IDLE_S)
end

-- Records that a worker holds the context with this key (contract/prefixes.py: `hash_of_context`).
local function hold_context(worker, key)
  if string.sub(key, 1, #CONTEXT) ~= CONTEXT then return end
  if worker and (trimmed[worker] or redis.call('EXISTS', HELD .. worker) == 1) then
    hold_prefixes(worker, {'0040' .. string.sub(key, #CONTEXT + 1, #CONTEXT + HASH - 4)}, 0)
  end
end

-- Returns for how many seconds the least busy of the other live workers will prefill prompts that it has taken from a list, or nil.
local MAX_WORKERS = 4 -- that may be gone
local function least_busy_s(list, worker, now)
  for _ = 1, MAX_WORKERS do
    local first = redis.call('ZRANGE', BUSY .. list, 0, 1, 'WITHSCORES')
    local at = first[1] == worker and 3 or 1
    local other = first[at]
    if not other then return nil end
    if redis.call('EXISTS', HELD .. other) == 1 then return math.max(0, tonumber(first[at+1]) - now) end
    redis.call('ZREM', BUSY .. list, other)
  end
end

-- Sets for each job the bytes of its longest prefix (`all`) and of the longest one that this worker holds (`own`). Also sets the
-- seconds until this worker has prefilled the prompt (`here_s`), and the least such time of other workers (`there_s`).
local function estimate(jobs, list, cache, now)
  local worker, busy, hashes = cache.worker, BUSY .. list, {}
  for _, job in ipairs(jobs) do
    for _, hash in ipairs(job.hashes) do hashes[#hashes+1] = hash end
  end
  local own = redis.call('ZMSCORE', HELD .. worker, unpack(hashes))
  local holders = redis.call('HMGET', HOLDERS, unpack(hashes))
  local old_holders = redis.call('HMGET', OLD_HOLDERS, unpack(hashes))
  local own_busy_s = math.max(0, tonumber(redis.call('ZSCORE', busy, worker) or 0) - now)
  local other_busy_s = least_busy_s(list, worker, now)
  local before = 0 -- hashes of earlier jobs
  for _, job in ipairs(jobs) do
    local all, other = bytes_of(job.hashes[#job.hashes]), nil
    job.all, job.own = all, 0
    for i = #job.hashes, 1, -1 do
      local hash, holder = job.hashes[i], holders[before+i] or old_holders[before+i]
      if own[before+i] then
        job.own = bytes_of(hash)
        break
      end
      if not other and holder and holder ~= worker and redis.call('ZSCORE', HELD .. holder, hash) then
        other = holder
        local busy_s = math.max(0, tonumber(redis.call('ZSCORE', busy, holder) or 0) - now)
        job.there_s = busy_s + (all - bytes_of(hash)) / cache.bytes_per_s
      end
    end
    job.here_s = own_busy_s + (all - job.own) / cache.bytes_per_s
    if other or job.own > 0 then
      job.there_s = math.min(job.there_s or math.huge, other_busy_s and other_busy_s + all / cache.bytes_per_s or math.huge)
    else
      job.there_s = math.huge -- so jobs whose prefix no worker holds are taken in order, even if the estimates are wrong
    end
    before = before + #job.hashes
  end
end

-- Chooses among the first jobs of a key for a worker with a cache: the one with the longest prefix that the worker holds, or else
-- the first one, of those that no other worker would have prefilled earlier and those whose prefix no worker holds. The other jobs
-- are left to other workers, but for no longer than this worker would be behind them. The first job is passed over for at most the
-- time to prefill its prompt.
-- Returns the member of the job, or nil and for how many seconds the jobs are left.
local WINDOW = 16 -- jobs
local MAX_LEFT_S = 30
local REST_S = 0.1 -- before a worker that leaves all jobs looks again, because other jobs may have arrived
local function nearest_of_key(key, list, cache)
  local jobs, now = {}, clock()
  for _, member in ipairs(redis.call('ZRANGEBYLEX', BACKLOG .. list, '[' .. key .. '\0', '(' .. key .. '\1', 'LIMIT', 0, WINDOW)) do
    local found = redis.call('HMGET', JOB .. id_in(member), 'state', 'holder', 'refused', 'prefixes', 'left_since')
    if can_be_taken(unpack(found, 1, 3)) then
      jobs[#jobs+1] = {member = member, hashes = hashes_in(found[4] or ''), left_since = tonumber(found[5])}
    end
  end
  estimate(jobs, list, cache, now)
  local nearest, least
  for _, job in ipairs(jobs) do
    local behind_s = job.here_s - job.there_s
    if behind_s <= 0 and (not nearest or job.own > nearest.own) then nearest = job end
    if behind_s > 0 and (not least or behind_s < least.here_s - least.there_s) then least = job end
  end
  -- Returns for how many more seconds a job may be left or passed over
  local function left_s(job, max_s)
    if not job.left_since then redis.call('HSET', JOB .. id_in(job.member), 'left_since', stamp(now)) end
    return (job.left_since or now) + math.min(MAX_LEFT_S, max_s) - now
  end
  if not nearest then
    local wait_s = left_s(least, least.here_s - least.there_s)
    if wait_s > 0 then return nil, math.min(wait_s, REST_S) end
    return least.member
  end
  local first = jobs[1]
  return nearest ~= first and left_s(first, first.all / cache.bytes_per_s) <= 0 and first.member or nearest.member
end

-- Pushes the message of a job as a ticket, which is the next one to be popped.
local function return_ticket(list, message)
  redis.call('RPUSH', list, message)
end

-- Concurrency limits
--
-- The jobs that workers hold count against the limits that apply to them. SLOTS contains their ids for each name of a limit
-- (`terms_of`), and the field `slots` of an entry has the names. LIMITED contains the names that have slots. If the next job is above
-- a limit, its key or node is blocked in this list, so that the choice skips it. If all jobs of a list are blocked, its tickets are
-- dropped. So each job that returns its slot unblocks the name and pushes a ticket, in the lists in BLOCKED, which lack tickets.

-- Gives slots to the jobs that workers hold already, for all limits in the settings and in TERMS.
local function fill_slots(given)
  local is_limited = {}
  for name in pairs(given.limits) do is_limited[name] = true end
  for _, field in ipairs(redis.call('HKEYS', TERMS)) do
    if string.sub(field, 1, 1) == '\0' then is_limited[string.sub(field, 2)] = true end
  end
  for name in pairs(is_limited) do redis.call('SADD', LIMITED, name) end
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    local key, queue, before = unpack(redis.call('HMGET', JOB .. id, 'fairness_key', 'queue', 'slots'), 1, 3)
    local names, slots = levels_of(key or ''), {before or nil}
    names[#names+1] = '/' .. (queue or '')
    for _, name in ipairs(queue and names or {}) do
      if is_limited[name] and redis.call('SADD', SLOTS .. name, id) == 1 then slots[#slots+1] = name end
    end
    if #slots > 0 then redis.call('HSET', JOB .. id, 'slots', table.concat(slots, '\n')) end
  end
end

-- Returns how many slots of a name are in use.
local function num_held(name, given)
  if redis.call('SISMEMBER', LIMITED, name) == 0 then fill_slots(given) end
  return redis.call('SCARD', SLOTS .. name)
end

-- Returns the name of a limit that does not allow another job, or nil.
local function reached_limit(limits, given)
  for _, limit in ipairs(limits) do
    if num_held(limit[1], given) >= limit[2] then return limit[1] end
  end
end

-- Returns how many jobs of a name are in backlogs or held by workers.
local SEPARATOR = '\6\22' -- kombu's, between a queue and a priority in the key of a list
local function num_unfinished(name, given)
  local num_jobs = num_held(name, given)
  for _, queue in ipairs(redis.call('SMEMBERS', QUEUES)) do
    for priority = 0, 9 do
      local backlog = BACKLOG .. queue .. (priority > 0 and SEPARATOR .. priority or '')
      if name == '/' .. queue then
        num_jobs = num_jobs + redis.call('ZCARD', backlog)
      else
        num_jobs = num_jobs + redis.call('ZLEXCOUNT', backlog, '[' .. name .. '\0', '(' .. name .. '\1')
                            + redis.call('ZLEXCOUNT', backlog, '[' .. name .. '/', '(' .. name .. '0') -- the keys below it
      end
    end
  end
  return num_jobs
end

-- Blocks the jobs of a name in a list, because they are above the limit.
local function block(name, list)
  redis.call('SADD', BLOCKED .. name, list)
  local node = string.match(name, '^(.*/)[^/]*$') or ''
  block_child(node, name, name, list)
  block_child(node, name, name .. '/', list)
end

-- Unblocks the jobs of a name in all lists, and pushes tickets for up to `max_jobs` of them. Other limits may still block them. A
-- list remains in BLOCKED while it lacks tickets.
local function unblock(name, max_jobs)
  for _, list in ipairs(redis.call('SMEMBERS', BLOCKED .. name)) do
    local node = ''
    for _, level in ipairs(levels_of(name)) do
      for _, child in ipairs({level, level .. '/'}) do
        if redis.call('ZSCORE', children(node, list), child) == 'inf' then add_child(node, level, child, list, true) end
      end
      node = level .. '/'
    end
    local num_missing = redis.call('ZCARD', BACKLOG .. list) - redis.call('LLEN', list)
    local key = num_missing > 0 and next_key(list)
    local member = key and first_of_key(key, list)[1]
    local message = member and redis.call('HGET', JOB .. id_in(member), 'message')
    for _ = 1, message and math.min(num_missing, max_jobs) or 0 do return_ticket(list, message) end
    if num_missing <= 0 then redis.call('SREM', BLOCKED .. name, list) end
  end
end

-- Returns the slots of a job that no worker holds any more.
local function return_slots(id, slots)
  for name in string.gmatch(slots .. '\n', '([^\n]*)\n') do
    redis.call('SREM', SLOTS .. name, id)
    unblock(name, 1)
  end
end

-- Returns the next job of a list, or nil if no job can be taken. With the weights and limits that are `given` by settings, it also
-- returns the terms of the job, and skips jobs above a limit. A job that a worker of a version without backlogs has taken or ended
-- is removed from the backlog. If the next jobs are left to other workers, it returns nil, and for how many seconds and the message
-- of one of these jobs.
local MAX_STALE = 1000 -- jobs, which takes a few milliseconds
local FIELDS_TO_TAKE = {'state', 'holder', 'refused', 'submitted_at', 'work', 'message', 'queue', 'prefixes'}
local function next_job(list, given)
  for _ = 1, MAX_STALE do
    local key, path = next_key(list, not given)
    if not key then return nil end
    local members = first_of_key(key, list)
    local id = members[1] and id_in(members[1])
    local found = id and redis.call('HMGET', JOB .. id, unpack(FIELDS_TO_TAKE))
    if found and can_be_taken(unpack(found, 1, 3)) and found[6] then
      local terms = given and terms_of(key, found[7], given)
      local reached = given and reached_limit(terms.limits, given)
      if not reached then
        local member, cache = members[1], given and given.cache
        if cache and found[8] then
          local nearest, left_s = nearest_of_key(key, list, cache)
          if not nearest then return nil, {s = left_s, message = found[6]} end
          if nearest ~= member then
            member, id = nearest, id_in(nearest)
            found = redis.call('HMGET', JOB .. id, unpack(FIELDS_TO_TAKE))
          end
        end
        return {id = id, list = list, key = key, path = path, terms = terms, member = member, is_last = not members[2],
                submitted_at = found[4], work = found[5], message = found[6], prefixes = cache and found[8], cache = cache}
      end
      block(reached, list)
      if reached == '/' .. found[7] then return nil end
    else
      if id then redis.call('ZREM', BACKLOG .. list, members[1]) end
      if not members[2] then deactivate(key, list) end
    end
  end
end

-- Returns the job that a ticket with the id `own` stands for, or nil if no job waits. A ticket whose own job has no entry stands for
-- this job, because the worker reports the error to its sender. Such a job has only an id.
local function job_of_ticket(list, own, given)
  local job, left = next_job(list, given)
  if job and job.id == own then return job end
  local is_tree_lost = not job and redis.call('EXISTS', children('', list)) == 0
  local is_restored = restore_to_backlog(own, is_tree_lost)
  if is_restored == nil then return {id = own} end
  if is_restored or is_tree_lost then return next_job(list, given) end
  return job, left
end

-- Removes one ticket from a list, because a job has left the backlog without being taken. If the next message is not a ticket, a
-- ticket remains, which `take` drops when no job waits. A large message is searched, because it uses much memory.
local LARGE_MESSAGE = 65536 -- bytes
local function drop_ticket(id, list)
  if redis.call('HSTRLEN', JOB .. id, 'message') >= LARGE_MESSAGE
     and redis.call('LREM', list, -1, redis.call('HGET', JOB .. id, 'message')) == 1 then return end
  local message = redis.call('LINDEX', list, -1)
  if message and ticket_id(message) then redis.call('RPOP', list) end
end

-- Adds a job without a slot to the waiting jobs of its queue.
local function wait_in_queue(id, queue, priority, submitted_at)
  redis.call('ZADD', WAITING .. queue, stamp(priority * WEIGHT + submitted_at), id)
  redis.call('SADD', QUEUES, queue)
end

-- Writes a new entry. `list` is the key of the Redis list to which the message is pushed. More fields can follow. The field `packs`
-- shows that the sender can read packed journals. Versions before contract/journal.py don't write it.
local function add_entry(job, id, task, queue, list, priority, timeout, message, submitted_at, ...)
  redis.call('HSET', job, 'state', 'queued', 'task', task, 'queue', queue, 'list', list, 'priority', priority,
             'submitted_at', stamp(submitted_at), 'message', message, 'next_seq', 0, 'packs', 1, ...)
  redis.call('DEL', JOURNAL .. id) -- of an older job with this id
  wait_in_queue(id, queue, priority, submitted_at)
  if timeout ~= '' then redis.call('ZADD', DUE, stamp(submitted_at + timeout), id) end
end

-- Lets a worker hold a job of a backlog until its lease ends, and charges its key.
local function hold(job, token, lease_ends_at)
  local fields, slots = {'holder', token, 'charged', charge(job)}, {}
  redis.call('ZREM', BACKLOG .. job.list, job.member)
  if job.is_last then deactivate(job.key, job.list) end
  for i, limit in ipairs(job.terms.limits) do
    slots[i] = limit[1]
    redis.call('SADD', SLOTS .. limit[1], job.id)
  end
  if #slots > 0 then fields[5], fields[6] = 'slots', table.concat(slots, '\n') end
  redis.call('HSET', JOB .. job.id, unpack(fields))
  redis.call('ZADD', LEASES, lease_ends_at, job.id)
  if job.prefixes then hold_prefixes_of(job) end
end

-- Releases the message of a job, so that no worker holds it. `slots` is a field of its entry.
local function drop_holder(job, id, slots)
  redis.call('HDEL', job, 'holder', 'slots')
  redis.call('ZREM', LEASES, id)
  if slots then return_slots(id, slots) end
end

-- Releases the message of a job and returns it to its queue. If the job has ended, the message is not returned, and
-- the reaper completes the missing steps for Celery. Returns whether the message was returned.
local function requeue(job, cancel, id)
  local found = redis.call('HMGET', job, 'state', 'queue', 'list', 'priority', 'submitted_at', 'message', 'refused', 'settled',
                           'fairness_key', 'slots', 'charged')
  drop_holder(job, id, found[10])
  return_charge(job, found[11], found[3], found[9])
  redis.call('ZREM', DELAYED, id)
  local state, message = found[1], found[6]
  if state == 'done' and not found[8] then redis.call('ZADD', DUE, stamp(clock()), id) end
  if not message or state == 'done' or found[7] then return false end
  return_ticket(found[3], message)
  if state == 'running' then
    redis.call('HSET', job, 'state', 'handed_back', 'left_at', stamp(clock()), 'lost', 1)
    redis.call('ZREM', RUNNING, id)
  end
  add_to_backlog(id, found[3], found[9] or '', found[5])
  wait_in_queue(id, found[2], tonumber(found[4]), tonumber(found[5]))
  if redis.call('EXISTS', cancel) == 1 then redis.call('ZADD', DUE, stamp(clock()), id) end
  return true
end

-- Stores and publishes a state under Celery's own key, as Celery does. Nothing replaces a success.
local function store_state(key, value, expires)
  if string.find(redis.call('GETRANGE', key, 0, 30), '^{"status": ?"SUCCESS"') then return false end
  if expires == '' then redis.call('SET', key, value) else redis.call('SETEX', key, expires, value) end
  redis.call('PUBLISH', key, value)
  return true
end

-- Settles a job: Celery has its end, and the next steps of its canvas have been sent. The entry expires later, after `keep_s`
-- seconds (default: the field of the entry). Until then, it only has the fields that readers need. Redis stores a hash compactly
-- only if it never had a long value, so the entry is written anew, which saves half of its memory.
local function settle(job, id, keep_s)
  redis.call('ZREM', DUE, id)
  keep_s = keep_s or redis.call('HGET', job, 'keep_s')
  if redis.call('ZSCORE', DEAD, id) then -- the job can be queued again, so the message stays
    redis.call('HDEL', job, 'result')
    redis.call('HSET', job, 'settled', 1)
  else
    redis.call('HDEL', job, 'result', 'message', 'prefixes', 'left_since', 'list', 'work', 'run', 'first_seq', 'failures', 'before', 'packs',
               'charged')
    local fields = redis.call('HGETALL', job)
    redis.call('DEL', job)
    redis.call('HSET', job, 'settled', 1, unpack(fields))
  end
  if keep_s then redis.call('EXPIRE', job, keep_s) end
end

-- Returns the reason in the last event of a job, which is `error` or its finish_reason, or ''.
local function reason_of(event)
  return string.match(event, '^{"seq":%d+,"type":"(error)"')
    or string.match(event, '^{"seq":%d+,"type":"done","finish_reason":"(%a+)"') or ''
end

-- Returns the last event of a job that succeeds, without the details that follow its finish_reason. The entry of a job whose result
-- Celery has needs no details, because the journal and the result have them.
local function without_details(event)
  local start = string.match(event, '^{"seq":%d+,"type":"done","finish_reason":"%a+"')
  return start and start .. '}' or event
end

-- Announces the end of a job in the stream of webhook events if a gateway requested it.
local function announce_end(id, event)
  local announcement = redis.call('GET', HEEDED .. id)
  if not announcement then return end
  redis.call('XADD', ENDS, 'MAXLEN', '~', MAX_ENDS, '*', 'heeded', announcement, 'end', reason_of(event))
  redis.call('DEL', HEEDED .. id)
end

-- The first arguments of scripts that write events (ledger.py: `_write_options`).
local NUM_OPTIONS = 7
local function write_options()
  return {field = ARGV[1], max_events = ARGV[2], event_ttl_s = ARGV[3], result_ttl_s = ARGV[4], dead_ttl_s = ARGV[5],
          settle_s = tonumber(ARGV[6]), channels = ARGV[7], ended = {differences = {}, learnt = {}}}
end

-- Appends an event to the journal of its job, and publishes it. `data` is the JSON after the `seq`. Returns the whole JSON. The
-- caller sets `next_seq`.
local function append_event(options, id, seq, data)
  local event = '{"seq":' .. seq .. ',' .. data
  redis.call('XADD', JOURNAL .. id, 'MAXLEN', '~', options.max_events, (seq + 1) .. '-0', options.field, event)
  redis.call('PUBLISH', options.channels .. id, event)
  return event
end

-- Replaces the events of a journal with one entry that has all of them (contract/journal.py). The last event must follow.
local function pack_journal(options, id, seq, packed)
  local journal = JOURNAL .. id
  redis.call('DEL', journal)
  redis.call('XADD', journal, seq .. '-0', EVENTS_FIELD, packed)
  options.has_packed = id
end

local SHORT_JOURNAL = 50 -- events; copying a longer journal takes too long

-- Ends a job with this event. `run` is the attempt that wrote the event, or '' without an attempt. Only jobs without an attempt can
-- be in a backlog. `cost` in tokens is '' if it is unknown. `settle` must follow, at once if the event `completes` the job.
-- Returns the fields `keep_s`, `holder`, `slots` and `stored` of the entry.
local function end_job(options, job, id, run, is_dead, seq, event, cost, completes)
  local found = redis.call('HMGET', job, 'queue', 'digest', 'list', 'charged', 'fairness_key', 'work', 'holder', 'slots', 'stored')
  local queue, digest, list = unpack(found, 1, 3)
  redis.call('ZREM', WAITING .. queue, id)
  redis.call('ZREM', RUNNING, id)
  if run == '' then
    redis.call('ZREM', DELAYED, id)
    if leave_backlog(id) and redis.call('LLEN', list) > redis.call('ZCARD', BACKLOG .. list) then drop_ticket(id, list) end
  end
  if found[4] then
    if cost ~= '' then replace_charge(options.ended, found[4], list, found[5] or '', found[6], tonumber(cost)) end
    if not completes then redis.call('HDEL', job, 'charged') end
  end
  local keep_s = options.event_ttl_s
  if is_dead then
    keep_s = options.dead_ttl_s
    redis.call('ZREMRANGEBYSCORE', DEAD, '-inf', stamp(clock() - keep_s))
    redis.call('ZADD', DEAD, stamp(clock()), id)
  elseif digest then
    keep_s = options.result_ttl_s
  end
  redis.call('HSET', job, 'state', 'done', 'ended_by', run, 'end', event, 'keep_s', keep_s, 'next_seq', seq + 1)
  redis.call('ZADD', ENDED, stamp(clock()), id)
  if not options.has_trimmed_ended then
    options.has_trimmed_ended = true
    redis.call('ZREMRANGEBYRANK', ENDED, 0, -MAX_ENDED - 1)
    redis.call('EXPIRE', ENDED, options.event_ttl_s)
  end
  redis.call('DEL', CANCEL .. id)
  local journal = JOURNAL .. id
  if seq < SHORT_JOURNAL or options.has_packed == id then -- a stream reserves 4 KiB at its end, a copy does not
    redis.call('COPY', journal, journal .. ':copy', 'REPLACE')
    redis.call('RENAME', journal .. ':copy', journal)
  end
  redis.call('EXPIRE', journal, options.event_ttl_s)
  announce_end(id, event)
  return keep_s, unpack(found, 7, 9)
end

--@ submit
-- Writes the entries of jobs and pushes their messages, all or none. A job that already has an entry is not changed.
-- KEYS: entry and list of each job.
-- ARGV: seconds between two jobs, number of jobs in later calls, JSON of weights and limits (`terms_of`) if jobs above a limit are
-- rejected or ''; then for each job: id, task, queue, priority, timeout or '', delay, digest of its payload if it has an idempotency
-- key or '', work, tenant or '', fairness key, hashes of prefixes, message, number of events, and for each event its topic and text.
-- Returns for each job 1 (new), 0 (exists) or -1 (exists with another digest). Also returns how many subscribers received an
-- event, or -1 if there was no event. The error OVERLIMIT has the number of jobs, the limit and its name.
local step_s, num_following = tonumber(ARGV[1]), tonumber(ARGV[2])
local NUM_VALUES, FIRST = 13, 4
local num_jobs, now, verdicts, num_subscribers = #KEYS / 2, clock(), {}, -1
if ARGV[3] ~= '' then
  local given, num_new, max_jobs, at = cjson.decode(ARGV[3]), {}, {}, FIRST
  for i = 1, num_jobs do
    local queue, fairness_key, num_events = ARGV[at+2], ARGV[at+9], ARGV[at + NUM_VALUES - 1]
    local is_new = redis.call('EXISTS', KEYS[2*i-1]) == 0
    for _, limit in ipairs(is_new and terms_of(fairness_key, queue, given).limits or {}) do
      num_new[limit[1]], max_jobs[limit[1]] = (num_new[limit[1]] or 0) + 1, limit[2]
    end
    at = at + NUM_VALUES + 2 * num_events
  end
  for name, num in pairs(num_new) do
    local num_all = num_unfinished(name, given) + num + (num == num_jobs and num_following or 0)
    if num_all > max_jobs[name] then return redis.error_reply(table.concat({'OVERLIMIT', num_all, max_jobs[name], name}, ' ')) end
  end
end
local at = FIRST
for i = 1, num_jobs do
  local job, list = KEYS[2*i-1], KEYS[2*i]
  local id, task, queue, priority, timeout, delay = unpack(ARGV, at, at + 5)
  local digest, work, tenant, fairness_key, prefixes, message, num_events = unpack(ARGV, at + 6, at + NUM_VALUES - 1)
  local first_event = at + NUM_VALUES
  at = first_event + 2 * num_events
  if redis.call('EXISTS', job) == 1 then
    verdicts[i] = (digest == '' or redis.call('HGET', job, 'digest') == digest) and 0 or -1
  else
    verdicts[i] = 1
    local submitted_at = now - math.min(1, (num_jobs - i + num_following) * step_s)
    add_entry(job, id, task, queue, list, tonumber(priority), timeout, message, submitted_at, 'work', work)
    if delay ~= '0.0' then redis.call('HSET', job, 'delay', delay) end
    if digest ~= '' then redis.call('HSET', job, 'digest', digest) end
    if tenant ~= '' then redis.call('HSET', job, 'tenant', tenant) end
    if fairness_key ~= '' then redis.call('HSET', job, 'fairness_key', fairness_key) end
    if prefixes ~= '' then redis.call('HSET', job, 'prefixes', prefixes) end
    if message ~= '' then
      add_to_backlog(id, list, fairness_key, submitted_at)
      redis.call('LPUSH', list, message)
    end
    for event = first_event, at - 2, 2 do
      num_subscribers = math.max(num_subscribers, redis.call('PUBLISH', ARGV[event], ARGV[event+1]))
    end
  end
end
return {verdicts, num_subscribers}

--@ cancel
-- Cancels a job. The caller ends it if it waits. The worker that runs it reads the key `cancel`.
-- KEYS: entry, cancel. ARGV: id, 1 if a running job must end as well, TTL of the key `cancel` in seconds.
-- Returns the job's state or ''. A running job is queued again if the lease of its worker has expired. It keeps running if no
-- worker holds its message, because Celery has acknowledged the message and the worker is about to write the end.
local job, cancel = unpack(KEYS)
local id, ends_running, ttl_s = unpack(ARGV)
local state, holder = unpack(redis.call('HMGET', job, 'state', 'holder'), 1, 2)
if state == 'done' then return state end
if ends_running == '1' then
  redis.call('SETEX', cancel, ttl_s, '1') -- all attempts that start from now on read this
  local lease_ends_at = tonumber(redis.call('ZSCORE', LEASES, id) or 0)
  if state == 'running' and holder and lease_ends_at <= clock() and requeue(job, cancel, id) then state = 'handed_back' end
end
return state or ''

--@ purge
-- Cancels a page of jobs that wait in a list, and removes as many tickets. Jobs that a worker holds are not changed.
-- KEYS: list, waiting jobs of its queue. ARGV: the options, maximum number of jobs, JSON of the end after its `seq`, the
-- parts before and after the job's id of the value that Celery stores, its TTL in seconds or ''.
-- Returns the number of removed jobs and messages, the number of ended jobs, and the messages of jobs that must be ended one by
-- one, because they belong to a group or chain, have events, or were sent by plain Celery.
local options = write_options()
local list, waiting = unpack(KEYS)
local max_jobs, data, before_id, after_id, expires = unpack(ARGV, NUM_OPTIONS + 1, NUM_OPTIONS + 5)
local num_removed, num_ended, others = 0, 0, {}
while num_removed < tonumber(max_jobs) do
  local popped = redis.call('RPOP', list)
  local own = popped and ticket_id(popped)
  local found
  if own then found = job_of_ticket(list, own) elseif not popped then found = next_job(list) end
  if not popped and not found then break end
  num_removed = num_removed + 1
  if popped and not own then
    others[#others+1] = popped
  elseif found then
    local id, job = found.id, JOB .. found.id
    local state, next_seq, message = unpack(redis.call('HMGET', job, 'state', 'next_seq', 'message'), 1, 3)
    local has_family = message and (string.find(message, '"group": "', 1, true) or string.find(message, '"parent_id": "', 1, true))
    local was_sent_by_cellama = message and ticket_id(message)
    if not state then
      redis.call('ZREM', waiting, id) -- Redis has evicted the entry
    else
      leave_backlog(id)
      if state == 'queued' and next_seq == '0' and was_sent_by_cellama and not has_family then
        local event = append_event(options, id, 0, data)
        end_job(options, job, id, 'purge', false, 0, event, '', false)
        local value = before_id .. id .. after_id
        if expires == '' then redis.call('SET', RESULT .. id, value) else redis.call('SETEX', RESULT .. id, expires, value) end
        redis.call('PUBLISH', RESULT .. id, value)
        settle(job, id)
        num_ended = num_ended + 1
      else
        others[#others+1] = message
      end
    end
  end
end
return {num_removed, num_ended, others}

--@ requeue_dead
-- Queues a dead-letter job again as a new job.
-- KEYS: entry, new entry, list. ARGV: id, new id, message. Returns 0 if the job is not a dead-letter job.
local job, new_job, list = unpack(KEYS)
local id, new_id, message = unpack(ARGV)
if redis.call('ZREM', DEAD, id) == 0 then return 0 end
local task, queue, priority = unpack(redis.call('HMGET', job, 'task', 'queue', 'priority'), 1, 3)
local now = clock()
add_entry(new_job, new_id, task, queue, list, tonumber(priority), '', message, now)
for _, field in ipairs({'tenant', 'fairness_key', 'work', 'prefixes'}) do
  local value = redis.call('HGET', job, field)
  if value then redis.call('HSET', new_job, field, value) end
end
add_to_backlog(new_id, list, redis.call('HGET', job, 'fairness_key') or '', now)
redis.call('LPUSH', list, message)
redis.call('HDEL', job, 'message')
return 1

--@ find
-- Finds jobs in a part of a sorted set. It changes nothing, and takes a millisecond or two for 500 jobs.
-- KEYS: sorted set. ARGV: first rank, number of jobs to look at, 1 if the highest scores come first, maximum number of matches, part
-- of the id or '', task or '', queue or '', tenant or '*', reasons between commas or '' (`reason_of`; an unfinished job has 'none').
-- Returns the number of jobs that were looked at, and for each match its id, score, task, queue, priority, time of submission, number
-- of attempts, worker, tenant and reason.
local first, num_ids, is_reversed, max_found = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local text, task, queue, tenant, reasons = unpack(ARGV, 5, 9)
local range = is_reversed and 'ZREVRANGE' or 'ZRANGE'
local ids, num_found, reply = redis.call(range, KEYS[1], first, first + num_ids - 1, 'WITHSCORES'), 0, {0}
for i = 1, #ids, 2 do
  if num_found == max_found then break end
  local id = ids[i]
  reply[1] = (i + 1) / 2
  if text == '' or string.find(id, text, 1, true) then
    local job = JOB .. id
    local of_task, of_queue, of_tenant = unpack(redis.call('HMGET', job, 'task', 'queue', 'tenant'), 1, 3)
    if of_task and (task == '' or of_task == task) and (queue == '' or of_queue == queue) and (tenant == '*' or of_tenant == tenant) then
      local found = redis.call('HMGET', job, 'priority', 'submitted_at', 'attempt', 'worker', 'end')
      local reason = found[5] and reason_of(found[5]) or 'none'
      if reasons == '' or string.find(reasons, ',' .. reason .. ',', 1, true) then
        num_found = num_found + 1
        for _, value in ipairs({id, ids[i + 1], of_task, of_queue, found[1] or '', found[2] or '', found[3] or '',
                                found[4] or '', of_tenant or '', reason}) do
          reply[#reply + 1] = value
        end
      end
    end
  end
end
return reply

--@ forget_queue
-- Removes a queue from the set of queues if it has neither waiting jobs nor messages. KEYS: its waiting jobs, its lists.
-- ARGV: queue.
if redis.call('EXISTS', unpack(KEYS)) == 0 then redis.call('SREM', QUEUES, ARGV[1]) end
return 1

--@ take
-- Lets a worker hold the job that its ticket stands for, and a page of further jobs for which it has capacity.
-- KEYS: list of the ticket, then the lists of each model in the order in which to read them.
-- ARGV: id in the ticket, token, 1 if this call repeats one that may have failed, lease in seconds, divisor of the length of a
-- list that limits a page, maximum bytes of a message in a page, JSON of weights and limits (`terms_of`), JSON of the worker's cache
-- or ''; then for each model: its capacity, its number of lists.
-- Returns for each job: its list, its id, its message or '' if it is the ticket, its token (the token of this call and a number),
-- and the seconds since it was submitted. If no entry exists for a ticket, its token and seconds are ''. If the next jobs are left to
-- other workers, returns the list, '', '', '', and for how many seconds.
local own, token, lease_s, divisor, max_bytes = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local given, now, reply = cjson.decode(ARGV[7]), clock(), {}
if ARGV[8] ~= '' then given.cache = cjson.decode(ARGV[8]) end
local function add(list, id, message, held_with, submitted_at)
  local waited = submitted_at and stamp(math.max(0, now - tonumber(submitted_at))) or ''
  for _, value in ipairs({list, id, message, held_with, waited}) do reply[#reply+1] = value end
end

if ARGV[3] == '1' then -- the reply of a call that arrived was lost
  for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    local found = redis.call('HMGET', JOB .. id, 'holder', 'list', 'message', 'submitted_at')
    local holder, list, message, submitted_at = unpack(found, 1, 4)
    if holder and message and string.sub(holder, 1, #token) == token then add(list, id, message, holder, submitted_at) end
  end
  if #reply > 0 then return reply end
end

local function take(job, message)
  local held_with = token .. '.' .. #reply
  hold(job, held_with, stamp(now + lease_s))
  add(job.list, job.id, message, held_with, job.submitted_at)
end
local function is_heavy(text) return string.find(text, '"' .. WEIGHT_HEADER .. '"', 1, true) end

local job, left = job_of_ticket(KEYS[1], own, given)
if left then
  return_ticket(KEYS[1], left.message)
  return {KEYS[1], '', '', '', stamp(left.s)}
elseif job and job.message then
  take(job, job.id == own and '' or job.message)
  if is_heavy(job.message) then return reply end
elseif job then
  add(KEYS[1], own, '', '')
end
local MAX_TICKETS = 100 -- used or dropped for each list, which takes up to 3 ms if all jobs are above a limit
local first = 2 -- list of the next model
for at = 9, #ARGV, 2 do
  local capacity, num_lists = tonumber(ARGV[at]), tonumber(ARGV[at+1])
  for i = first, first + num_lists - 1 do
    local list = KEYS[i]
    local num_left = capacity > 0 and math.min(MAX_TICKETS, math.ceil(redis.call('LLEN', list) / divisor)) or 0
    while capacity > 0 and num_left > 0 do
      local ticket = redis.call('RPOP', list)
      local own = ticket_id(ticket)
      local job, left
      if own then job, left = job_of_ticket(list, own, given) end
      local message = job and job.message
      if message and #message <= max_bytes and not is_heavy(message) then
        take(job, message)
        capacity = capacity - 1
      elseif job or left or not own then
        return_ticket(list, ticket)
        capacity = 0 -- messages of plain Celery, tickets without an entry, and large jobs are taken alone, and some jobs are left
      end -- else no job can be taken, so the ticket is dropped
      num_left = num_left - 1
    end
  end
  first = first + num_lists
end
return reply

--@ renew
-- Renews the leases of messages.
-- KEYS: entries. ARGV: lease in seconds, then id and token of each message.
-- Returns the indices, from 0, of messages that this worker no longer holds.
local ends_at, lost = stamp(clock() + tonumber(ARGV[1])), {}
for i, job in ipairs(KEYS) do
  local id, token = unpack(ARGV, 2 * i, 2 * i + 1)
  local holder, state = unpack(redis.call('HMGET', job, 'holder', 'state'), 1, 2)
  if holder == token then
    redis.call('ZADD', LEASES, ends_at, id)
  elseif state ~= 'done' then
    lost[#lost+1] = i - 1
  end
end
return lost

--@ release
-- Releases a message that Celery no longer needs, if this worker holds it.
-- KEYS: entry. ARGV: id, token, seconds after which the reaper ends a job that Celery has refused, seconds after which the claim
-- on the body of a chord has expired. Returns 1 if the worker held the message.
local job = KEYS[1]
local id, token, refused_s, claim_s = unpack(ARGV)
local found = redis.call('HMGET', job, 'holder', 'state', 'stored', 'settled', 'message', 'slots')
local holder, state, stored, settled, message, slots = unpack(found, 1, 6)
if holder ~= token then return 0 end
drop_holder(job, id, slots)
if state == 'queued' or state == 'handed_back' then
  -- Celery has refused the job, or is about to store a revoke. If Celery does not end it, the reaper does.
  redis.call('HSET', job, 'refused', 1)
  redis.call('ZADD', DUE, stamp(clock() + refused_s), id)
elseif state == 'done' and not settled then
  -- Celery reserves the body of a chord for the worker that counted the last part. If this worker missed the reply or died,
  -- no worker sends the body, so the reaper counts this part again.
  local group = string.match(message or '', '"group": ?"([^"]+)"')
  local claim = group and redis.call('GET', CHORD .. group .. '.c')
  if claim and claim ~= 'done' and redis.call('EXISTS', CHORD .. group .. '.s') == 1 then
    redis.call('ZADD', DUE, stamp(clock() + claim_s), id)
  elseif stored or string.find(message or '', '"ignore_result": ?true') then
    settle(job, id)
  else
    redis.call('ZADD', DUE, stamp(clock()), id) -- Celery could not store the end, so the reaper does
  end
end
return 1

--@ requeue
-- Returns a message to its queue, if this worker holds it.
-- KEYS: entry, cancel. ARGV: id, token. Returns 1 if the worker held the message.
local job, cancel = unpack(KEYS)
local id, token = unpack(ARGV)
if redis.call('HGET', job, 'holder') ~= token then return 0 end
requeue(job, cancel, id)
return 1

--@ set_aside
-- Keeps the message of a job away from all workers until its ETA. Then `restore` returns it to its queue.
-- KEYS: entry. ARGV: id, token, seconds until the ETA. Returns 0 if the worker does not hold the message.
local job = KEYS[1]
local id, token, wait_s = unpack(ARGV)
local found = redis.call('HMGET', job, 'holder', 'queue', 'slots', 'charged', 'list', 'fairness_key')
local holder, queue, slots, charged, list, key = unpack(found, 1, 6)
if holder ~= token then return 0 end
drop_holder(job, id, slots)
return_charge(job, charged, list, key)
redis.call('ZADD', DELAYED, stamp(clock() + wait_s), id)
redis.call('ZREM', WAITING .. queue, id)
return 1

--@ restore
-- Returns messages to their queues if their lease has expired or their ETA has come. Any worker can call this at any time.
-- KEYS: time of the last call. ARGV: lease in seconds, maximum number of messages of each sort.
-- Returns the number of expired leases, and the number of jobs whose ETA has come.
local called = KEYS[1]
local lease_s, max_messages, now = tonumber(ARGV[1]), ARGV[2], clock()
local function requeue_all(set)
  local ids = redis.call('ZRANGEBYSCORE', set, '-inf', stamp(now), 'LIMIT', 0, max_messages)
  for _, id in ipairs(ids) do requeue(JOB .. id, CANCEL .. id, id) end
  return #ids
end
local num_delayed = requeue_all(DELAYED)
local last_at = tonumber(redis.call('GET', called) or 0)
redis.call('SET', called, stamp(now))
if now < last_at or now - last_at > lease_s / 3 then
  -- No reaper has called for a while, so workers may have been unable to renew their leases. There may have been an outage, a
  -- failover to a server with another clock, or no worker at all. Leases get at least half and at most a whole lease from now on.
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', stamp(now + lease_s / 2))) do
    redis.call('ZADD', LEASES, stamp(now + lease_s / 2), id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, stamp(now + lease_s), '+inf')) do
    redis.call('ZADD', LEASES, stamp(now + lease_s), id)
  end
  return {0, num_delayed}
end
return {requeue_all(LEASES), num_delayed}

--@ begin
-- Starts an attempt, unless the verdict forbids it, and stores the state STARTED for Celery.
-- KEYS: entry, cancel, Celery's result. ARGV: run, worker, maximum number of failures, 1 if the attempt runs alone, token ('any'
-- is not checked), value that Celery stores or '', its TTL in seconds or ''.
-- Returns verdict, number of the attempt, failures, and seconds since the job was submitted or since it may run. If the attempt
-- has started, also returns the earlier attempts that were not reported, the time, the `seq` of its first event, its fairness key,
-- and its charge or ''.
local job, cancel, result = unpack(KEYS)
local run, worker, max_failures, alone, token, stored, expires = unpack(ARGV)
local found = redis.call('HMGET', job, 'state', 'holder', 'submitted_at', 'failures', 'run', 'delay', 'began_at', 'left_at',
                         'lost', 'worker', 'before', 'attempt', 'next_seq', 'fairness_key', 'charged', 'attempts')
local state, holder, submitted_at, last_failures, last_run, delay, began_at, left_at = unpack(found, 1, 8)
local lost, last_worker, before, attempt, next_seq, fairness_key, charged, attempts = unpack(found, 9, 16)
if not state then return {'gone', 0, 0, '0'} end
local waited = stamp(math.max(0, clock() - tonumber(submitted_at) - tonumber(delay or 0)))
if state == 'done' then return {'done', 0, 0, waited} end
if token ~= 'any' and holder ~= token then return {'superseded', 0, 0, waited} end
if alone ~= '1' and tonumber(last_failures or 0) > 0 then return {'suspect', 0, 0, waited} end
local MAX_UNREPORTED = 2000 -- bytes
local now, failures = stamp(clock()), tonumber(last_failures or 0)
attempt, next_seq = tonumber(attempt or 0), tonumber(next_seq or 0)
local fields = {'state', 'running', 'run', run, 'worker', worker}
local function set(field, value) fields[#fields+1], fields[#fields+2] = field, value end
if last_run ~= run then -- else this call repeats one whose reply was lost
  if last_run then
    lost, attempts = lost or '1', attempts or ''
    local previous = table.concat({last_run, began_at or now, left_at or now, lost, last_worker}, ' ')
    if #attempts < MAX_UNREPORTED then set('attempts', attempts .. previous .. '\n') end
    before = lost == '1' and before and #before < MAX_UNREPORTED and before .. '\n' .. previous or previous
    set('before', before)
    redis.call('HDEL', job, 'left_at', 'lost')
  end
  attempt, failures = attempt + 1, failures + 1 -- until this attempt generates a token
  set('began_at', now)
  set('first_seq', next_seq)
  set('attempt', attempt)
  set('failures', failures)
end
redis.call('HSET', job, unpack(fields))
if stored ~= '' then store_state(result, stored, expires) end
local verdict = 'run'
if redis.call('EXISTS', cancel) == 1 then
  verdict = 'cancelled'
elseif failures > tonumber(max_failures) then
  verdict = 'dead'
end
return {verdict, attempt, failures, waited, before or '', now, next_seq, fairness_key or '', charged or ''}

--@ write
-- Writes events to journals and publishes them, each only if its run is the current run of its job.
-- ARGV: the options, then five values for each event. A terminal event has eight more values, and key and value of each context,
-- which expires as late as a result. `class` determines the effect of an event (EVENT_CLASSES in contract/events.py). `data` is
-- the JSON after the `seq`.
-- `stored` is the value that Celery stores for a job that succeeds. With it, this script completes the job: Celery has the
-- result, and the message that is held with `token` is released.
-- Returns the indices of events whose run is superseded, and of events before which the ledger lacks events of their run.
-- Each token passes through this script, so values that only other events need are passed and read only with these events.
local options = write_options()
local superseded, gaps, at, i = {}, {}, NUM_OPTIONS + 1, -1
while at <= #ARGV do
  local id, run, class, seq, data = unpack(ARGV, at, at + 4)
  at, i = at + 5, i + 1
  local is_dead, result, stored, expires, token, cost, packed, first_context
  if class == 'terminal' then
    local num_contexts
    is_dead, result, stored, expires, token, cost, packed, num_contexts = unpack(ARGV, at, at + 7)
    first_context = at + 8
    at = first_context + 2 * num_contexts
  end
  local job = JOB .. id
  local found = redis.call('HMGET', job, 'run', 'state', 'next_seq', 'failures', 'first_seq', 'worker')
  local state, next_seq = found[2], tonumber(found[3] or 0)
  local is_current, first_seq
  if run == '' then -- no worker runs the job, so the event gets the next seq
    is_current = state == 'queued' or state == 'handed_back'
    seq, first_seq = next_seq, next_seq
  else
    is_current = state == 'running' and found[1] == run
    seq, first_seq = tonumber(seq), tonumber(found[5] or 0)
  end
  if not is_current then
    -- an end that is written again after a lost reply is not superseded
    if not (state == 'done' and redis.call('HGET', job, 'ended_by') == run) then superseded[#superseded+1] = i end
  elseif seq > next_seq or seq < first_seq then
    gaps[#gaps+1] = i -- Redis has lost earlier events of this run, for example in a failover
  elseif seq == next_seq then -- else the event was written before
    if class == 'terminal' and packed ~= '' and first_seq == 0 and seq <= tonumber(options.max_events)
       and redis.call('HEXISTS', job, 'packs') == 1 then pack_journal(options, id, seq, packed) end
    local event = append_event(options, id, seq, data)
    if class == 'terminal' then
      local ending = stored ~= '' and without_details(event) or event
      local keep_s, holder, slots, was_stored = end_job(options, job, id, run, is_dead == '1', seq, ending, cost, stored ~= '')
      for context = first_context, at - 2, 2 do
        redis.call('SETEX', ARGV[context], options.result_ttl_s, ARGV[context+1])
        hold_context(found[6], ARGV[context])
      end
      if stored ~= '' then
        store_state(RESULT .. id, stored, expires)
        if holder == token then drop_holder(job, id, slots) end
        settle(job, id, keep_s)
      elseif not holder and was_stored then
        settle(job, id, keep_s) -- after a revoke or a time limit, Celery has already stored the end
      else
        if result ~= '' then redis.call('HSET', job, 'result', result) end
        redis.call('ZADD', DUE, stamp(clock() + options.settle_s), id) -- the worker settles the job before, or else the reaper does
      end
    elseif class == 'informative' or (class == 'progress' and found[4] == '0') then
      redis.call('HSET', job, 'next_seq', seq + 1)
    else -- the first event of an attempt, or its first token
      redis.call('HSET', job, 'next_seq', seq + 1, 'failures', class == 'progress' and 0 or found[4] or 0)
      if not redis.call('ZSCORE', RUNNING, id) then
        redis.call('ZREM', WAITING .. redis.call('HGET', job, 'queue'), id)
        redis.call('ZADD', RUNNING, stamp(clock()), id)
      end
    end
  end
end
add_costs(options.ended)
return {superseded, gaps}

--@ hand_back
-- Ends an attempt so that another worker continues the job. This is not a failure. The script `requeue` returns the message.
-- KEYS: entry. ARGV: id, run. Returns 1 if the attempt was the current one.
local job = KEYS[1]
local id, run = unpack(ARGV)
local found = redis.call('HMGET', job, 'run', 'state', 'queue', 'priority', 'submitted_at', 'failures')
local current_run, state, queue, priority, submitted_at, failures = unpack(found, 1, 6)
if current_run ~= run or state ~= 'running' then return 0 end
redis.call('HSET', job, 'state', 'handed_back', 'left_at', stamp(clock()), 'lost', 0)
if tonumber(failures or 0) > 0 then redis.call('HINCRBY', job, 'failures', -1) end -- else the attempt has generated a token
redis.call('ZREM', RUNNING, id)
wait_in_queue(id, queue, tonumber(priority), tonumber(submitted_at))
return 1

--@ end_unknown
-- Writes the last event of a job without an entry, unless its journal already has a last event.
-- KEYS: entry, journal. ARGV: field of an event, TTL of the journal in seconds, channel, the event's JSON after the `seq`.
-- Returns 1 if the event was written.
local job, journal = unpack(KEYS)
local field, ttl_s, channel, data = unpack(ARGV)
if redis.call('EXISTS', job) == 1 then return 0 end
local last, seq = redis.call('XREVRANGE', journal, '+', '-', 'COUNT', 1)[1], 0
if last then
  local kind = string.match(last[2][2], '^{"seq":%d+,"type":"(%a+)"')
  if kind == 'done' or kind == 'error' then return 0 end
  seq = tonumber(string.match(last[1], '^%d+')) -- ids of entries start at 1
end
local event = '{"seq":' .. seq .. ',' .. data
redis.call('XADD', journal, (seq + 1) .. '-0', field, event)
redis.call('EXPIRE', journal, ttl_s)
redis.call('PUBLISH', channel, event)
announce_end(string.sub(journal, #JOURNAL + 1), event)
return 1

--@ store_result
-- Stores a state for Celery. The entry of the job records its final state.
-- KEYS: result, entry. ARGV: value, TTL in seconds or '', the state if it is final or ''.
-- Returns 0 if a success was stored before, or if the state is REVOKED and the job has ended in another way.
local result, job = unpack(KEYS)
local value, expires, last_state = unpack(ARGV)
if last_state == 'REVOKED' then
  local state, ending = unpack(redis.call('HMGET', job, 'state', 'end'), 1, 2)
  if state == 'done' and reason_of(ending) ~= 'cancelled' then return 0 end -- the revoke came too late
end
local is_new = store_state(result, value, expires)
if is_new and last_state ~= '' and redis.call('EXISTS', job) == 1 then redis.call('HSET', job, 'stored', last_state) end
return is_new and 1 or 0

--@ settle
-- Records that Celery has the end of a job, and that the next steps of its canvas have been sent. KEYS: entry. ARGV: id.
local job, id = KEYS[1], ARGV[1]
if redis.call('HGET', job, 'state') == 'done' then settle(job, id) end
return 1

--@ claim_due
-- Claims jobs that are due. No other reaper gets them within the given time. If this reaper dies, they are due again afterwards.
-- ARGV: maximum number of jobs, seconds. Returns their ids, each followed by the state of the job. The state is 'held' if the job
-- has ended and a worker still holds its message, because this worker settles it.
local max_jobs, claim_s = ARGV[1], tonumber(ARGV[2])
local MAX_WAIT_S = 3600 -- between two attempts to settle a job
local claimed = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', stamp(clock()), 'LIMIT', 0, max_jobs)) do
  local state = redis.call('HGET', JOB .. id, 'state')
  if not state then
    redis.call('ZREM', DUE, id) -- the entry was evicted or deleted
  else
    local wait_s = claim_s
    if state == 'done' and redis.call('ZSCORE', LEASES, id) then
      state = 'held'
    elseif state == 'done' then -- sending the next steps may have failed, so retry with growing pauses
      wait_s = math.min(MAX_WAIT_S, claim_s * 2 ^ (redis.call('HINCRBY', JOB .. id, 'num_settlings', 1) - 1))
    end
    redis.call('ZADD', DUE, stamp(clock() + wait_s), id)
    claimed[#claimed+1] = id
    claimed[#claimed+1] = state
  end
end
return claimed

--@ add_tickets
-- Pushes the tickets that a list lacks because Redis or a worker has lost them. A worker that has just popped a ticket may not have
-- used it yet, so only as many tickets are pushed as were already missing at the last call. Messages of plain Celery count as
-- tickets here, but they never wait long, because a worker that pops one does not need capacity for it. A list in which all jobs
-- are above a limit needs no tickets.
-- KEYS: list. ARGV: maximum number of tickets, JSON of weights and limits (`terms_of`). Returns the number of pushed tickets.
local list, max_tickets = KEYS[1], tonumber(ARGV[1])
local missing = redis.call('ZCARD', BACKLOG .. list) - redis.call('LLEN', list)
if missing > 0 and not next_job(list, cjson.decode(ARGV[2])) then missing = 0 end
local num_pushed = math.min(missing, tonumber(redis.call('HGET', SHORTAGES, list) or 0))
if num_pushed > 0 then
  local members = redis.call('ZRANGE', BACKLOG .. list, 0, math.min(num_pushed, max_tickets) - 1)
  num_pushed = 0
  for i = #members, 1, -1 do
    local message = redis.call('HGET', JOB .. id_in(members[i]), 'message')
    if message then
      return_ticket(list, message)
      num_pushed = num_pushed + 1
    else
      redis.call('ZREM', BACKLOG .. list, members[i]) -- the entry was evicted or deleted
    end
  end
  missing = missing - #members
end
if missing > 0 then
  redis.call('HSET', SHORTAGES, list, missing)
  redis.call('EXPIRE', SHORTAGES, IDLE_S) -- lists of idle queues are not checked again
else
  redis.call('HDEL', SHORTAGES, list)
end
return math.max(0, num_pushed)

--@ restore_backlog
-- Checks a part of the waiting jobs of a queue, and adds a job to its backlog if it is missing there although a worker can take it
-- (`restore_to_backlog`). A job without an entry is removed from the waiting jobs.
-- KEYS: waiting jobs. ARGV: number of this check, maximum number of jobs. Consecutive checks look at consecutive parts.
-- Returns the jobs that have started and that no worker holds.
local waiting, max_jobs = KEYS[1], tonumber(ARGV[2])
local num_parts = math.max(1, math.ceil(redis.call('ZCARD', waiting) / max_jobs))
local first, lost = (tonumber(ARGV[1]) % num_parts) * max_jobs, {}
for _, id in ipairs(redis.call('ZRANGE', waiting, first, first + max_jobs - 1)) do
  local state, holder = unpack(redis.call('HMGET', JOB .. id, 'state', 'holder'), 1, 2)
  if not state then redis.call('ZREM', waiting, id) end
  if state == 'running' and not holder then lost[#lost+1] = id end
  restore_to_backlog(id, true)
end
return lost

--@ check_slots
-- Returns slots whose job no worker holds, because Redis has evicted its entry. Returns their number.
local num_lost = 0
for _, name in ipairs(redis.call('SMEMBERS', LIMITED)) do
  for _, id in ipairs(redis.call('SMEMBERS', SLOTS .. name)) do
    if not redis.call('ZSCORE', LEASES, id) then
      return_slots(id, name)
      num_lost = num_lost + 1
    end
  end
  if redis.call('EXISTS', SLOTS .. name) == 0 then unblock(name, 1) end
end
return num_lost

--@ set_limit
-- Sets the limit of a name, and lets workers take its jobs if the limit allows it.
-- ARGV: name, number of jobs, 0 for no limit, or '' for the limit of the settings, maximum number of tickets.
local name, max_jobs, max_tickets = unpack(ARGV)
if max_jobs == '' then redis.call('HDEL', TERMS, '\0' .. name) else redis.call('HSET', TERMS, '\0' .. name, max_jobs) end
redis.call('SREM', LIMITED, name) -- jobs may have been held without a slot, so all are counted again
unblock(name, tonumber(max_tickets))
return 1

--@ missing
-- Queues a running job again if no worker has held its message for a whole period, because Redis has lost it.
-- KEYS: entry, cancel. ARGV: id, period in seconds. Returns 1 if it was queued again.
local job, cancel = unpack(KEYS)
local id, period_s = unpack(ARGV)
local now, state = clock(), redis.call('HGET', job, 'state')
if not state or state == 'done' then redis.call('ZREM', RUNNING, id) end -- the entry was evicted or deleted
if state ~= 'running' or redis.call('ZSCORE', LEASES, id) then
  redis.call('ZREM', MISSING, id)
  return 0
end
local since = redis.call('ZSCORE', MISSING, id)
if not since then
  redis.call('ZADD', MISSING, stamp(now), id)
  return 0
end
if now - tonumber(since) < tonumber(period_s) then return 0 end
redis.call('ZREM', MISSING, id)
return requeue(job, cancel, id) and 1 or 0

--@ serve
-- Records that a worker reads these queues, or will read them once it has loaded their models. ARGV: queues.
local KEEP_S = 30 * 86400
local now = clock()
for _, queue in ipairs(ARGV) do redis.call('ZADD', SERVED, stamp(now), queue) end
redis.call('ZREMRANGEBYSCORE', SERVED, '-inf', stamp(now - KEEP_S))
redis.call('EXPIRE', SERVED, KEEP_S)
return 1

--@ watch
-- Records that a worker looks for jobs that no worker serves. KEYS: hash. ARGV: longest time in seconds between two looks.
-- Returns the time, and since when workers have looked without an interruption. Whatever was unserved during an interruption,
-- such as an outage of Redis or of all workers, is given its whole time afterwards.
local KEEP_S = 30 * 86400
local watched, max_gap_s = KEYS[1], tonumber(ARGV[1])
local found, now = redis.call('HMGET', watched, 'last', 'since'), clock()
local last, since = tonumber(found[1] or 0), found[2]
if not since or now < last or now - last > max_gap_s then since = stamp(now) end
redis.call('HSET', watched, 'last', stamp(now), 'since', since)
redis.call('EXPIRE', watched, KEEP_S)
return {stamp(now), since}

--@ unserved
-- Finds the waiting jobs of a queue that could have started before a time, and whose message no worker holds.
-- KEYS: waiting jobs. ARGV: the time, maximum number of jobs to check for each priority, maximum number of jobs to return.
local waiting, before, max_checked, max_found = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
for priority = 0, 9 do
  local low, high = stamp(priority * WEIGHT), stamp(priority * WEIGHT + before)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', waiting, low, high, 'LIMIT', 0, max_checked)) do
    if #found == max_found then return found end
    local entry = redis.call('HMGET', JOB .. id, 'submitted_at', 'delay')
    local may_start_at = tonumber(entry[1] or 0) + tonumber(entry[2] or 0)
    if may_start_at <= before and not redis.call('ZSCORE', LEASES, id) then found[#found+1] = id end
  end
end
return found

--@ demand
-- Finds the waiting jobs of models. KEYS: none. ARGV: separator in the names of lists, and queues. Returns the time, and for
-- each queue the number of waiting jobs and the submission time of the oldest. For messages of plain Celery, which are not in the
-- ledger yet, the submission time is "".
local reply, separator = {stamp(clock())}, ARGV[1]
for i = 2, #ARGV do
  local queue = ARGV[i]
  local waiting = WAITING .. queue
  local count, oldest = redis.call('ZCARD', waiting), ''
  if count > 0 then
    for priority = 0, 9 do
      local low, high = stamp(priority * WEIGHT), '(' .. stamp((priority + 1) * WEIGHT)
      local first = redis.call('ZRANGEBYSCORE', waiting, low, high, 'WITHSCORES', 'LIMIT', 0, 1)
      if first[2] then
        local at = tonumber(first[2]) - priority * WEIGHT
        if oldest == '' or at < oldest then oldest = at end
      end
    end
    if oldest ~= '' then oldest = stamp(oldest) end
  else
    for priority = 0, 9 do
      local list = priority == 0 and queue or queue .. separator .. priority
      count = count + redis.call('LLEN', list)
    end
  end
  reply[#reply+1], reply[#reply+2] = count, oldest
end
return reply

--@ strays
-- Finds the messages of plain Celery at the head of some lists, whose task has a name of cellama. Messages of other tasks are
-- not read further than needed to see this. KEYS: lists. ARGV: maximum number of messages per list, maximum bytes of all messages.
-- Returns for each message its list, id and task.
local found, num_bytes = {}, 0
for _, list in ipairs(KEYS) do
  for at = 1, tonumber(ARGV[1]) do
    local message = redis.call('LINDEX', list, -at)
    num_bytes = num_bytes + #(message or '')
    if not message or num_bytes > tonumber(ARGV[2]) then break end
    local task = string.find(message, '"cellama.', 1, true) and string.match(message, '"task": *"(cellama%.[%w_.]+)"')
    local id = task and not string.find(message, '"' .. SUBMITTED_AT_HEADER .. '"', 1, true) and id_of(message)
    if id then
      for _, value in ipairs({list, id, task}) do found[#found+1] = value end
    end
  end
end
return found

--@ adopt_stray
-- Moves a message of plain Celery from its list into a new entry, so that its job can end. A worker that has taken the message
-- in the meantime keeps it. KEYS: list, entry.
-- ARGV: id, task, queue, priority, time of submission, maximum number of messages to look at. Returns 1 if the message was moved.
local list, job = unpack(KEYS)
local id, task, queue, priority, submitted_at, max_messages = unpack(ARGV)
for at = 1, tonumber(max_messages) do
  local message = redis.call('LINDEX', list, -at)
  if not message then return 0 end
  if id_of(message) == id then
    redis.call('LREM', list, -1, message)
    if redis.call('EXISTS', job) == 1 then return 0 end -- a copy
    add_entry(job, id, task, queue, list, tonumber(priority), '', message, tonumber(submitted_at))
    return 1
  end
end
return 0

--@ replace_field
-- Replaces a field of a hash, unless its value has changed.
-- KEYS: hash. ARGV: field, expected value or '', new value. Returns 0 if the value has changed.
local hash = KEYS[1]
local field, before, value = unpack(ARGV)
if (redis.call('HGET', hash, field) or '') ~= before then return 0 end
redis.call('HSET', hash, field, value)
return 1

--@ ahead
-- Estimates how many jobs get a slot before a waiting job: all more urgent ones, those with the same priority that workers hold, and
-- those of the backlog that the choice between fairness keys prefers (docs/fair-share.md). With one key, it is the number of earlier
-- jobs. Jobs are expected to cost as much as a sample of the waiting jobs of their key. Of more than `max_keys` children of a node,
-- an even sample is read. Returns nil if the job does not wait, or else the number, and how many of these jobs are the first ones of
-- the queue; then for each key of the others: its first job, and its number of jobs.
-- KEYS: hash of weights. ARGV: id, JSON of the weights of the settings, maximum number of keys.
local id, given, max_keys = ARGV[1], cjson.decode(ARGV[2]), tonumber(ARGV[3])
local found = redis.call('HMGET', JOB .. id, 'queue', 'list', 'priority', 'submitted_at', 'fairness_key')
local queue, list, priority, submitted_at, key = found[1], found[2], tonumber(found[3]), found[4], found[5] or ''
local rank = queue and redis.call('ZRANK', WAITING .. queue, id)
if not rank then return nil end
local num_urgent = redis.call('ZCOUNT', WAITING .. queue, '-inf', string.format('(%.0f', priority * WEIGHT))
local num_until = redis.call('ZCOUNT', WAITING .. queue, '-inf', string.format('(%.0f', (priority + 1) * WEIGHT))
local backlog = BACKLOG .. (list or '')
local num_held = math.max(0, num_until - num_urgent - redis.call('ZCARD', backlog))
local own = member_of(id, key, submitted_at)
if not redis.call('ZSCORE', backlog, own) then -- a worker holds it
  local num_ahead = math.min(rank, num_urgent + math.max(0, num_held - 1))
  return {num_ahead, num_ahead}
end

local path, node, names, is_shared = {}, '', levels_of(key), false
if key ~= '' then names[#names+1] = key end -- the jobs of the key itself, beside the keys below it
for _, name in ipairs(names) do
  for _, child in ipairs({name, name .. '/'}) do
    local service = redis.call('ZSCORE', children(node, list), child)
    if service == 'inf' then return {rank, rank} end -- a limit blocks its key
    if service then
      path[#path+1] = {node = node, child = child, service = tonumber(service)}
      is_shared = is_shared or redis.call('ZCARD', children(node, list)) > 1
      node = child
      break
    end
  end
end
if not is_shared then return {rank, rank} end

local function base_of(child) return string.sub(child, -1) == '/' and string.sub(child, 1, -2) or child end
local function weight_of(parent, child)
  local base = base_of(child)
  if base ~= '' and base == base_of(parent) then return 1 end -- the jobs of a key beside the keys below it
  return tonumber(redis.call('HGET', KEYS[1], base) or given[base] or 1)
end
-- Returns the number of jobs between two members of the backlog, the mean cost of a sample of them, and the id of the first one.
local NUM_SAMPLED = 4
local function jobs_between(from, to)
  local count, first = redis.call('ZLEXCOUNT', backlog, from, to), redis.call('ZRANGEBYLEX', backlog, from, to, 'LIMIT', 0, 1)[1]
  if not first then return 0, 1 end
  local start, num_sampled, cost = redis.call('ZRANK', backlog, first), math.min(count, NUM_SAMPLED), 0
  for i = 0, num_sampled - 1 do
    local at = start + math.floor(i * count / num_sampled)
    local member = i == 0 and first or redis.call('ZRANGE', backlog, at, at)[1]
    local work = redis.call('HGET', JOB .. id_in(member), 'work')
    cost = cost + expected_cost(work, string.sub(member, 1, string.find(member, '\0', 1, true) - 1), list) / num_sampled
  end
  return count, math.max(cost, 0.001), id_in(first)
end
local function jobs_of_key(child)
  local base = base_of(child)
  return jobs_between('[' .. base .. '\0', '(' .. base .. '\1')
end
-- Returns whether other keys than the one with this name are below a child.
local function is_node(child)
  if base_of(child) == '' then return false end
  local below = redis.call('ZRANGE', children(child, list), 0, 1)
  return #below > 1 or #below == 1 and base_of(below[1]) ~= base_of(child)
end

-- Returns the number of jobs of a sibling that are served before its service exceeds `limit`, their cost, and one of them.
local function served_of_key(sibling, service, limit, weight, is_first)
  local count, unit, first = jobs_of_key(sibling)
  local turns = (limit - service) * weight / unit
  local whole = math.floor(turns + 1e-9)
  if turns - whole > 1e-9 or is_first then whole = whole + 1 end -- equal services are served by name
  local served = math.min(count, whole)
  return served, served * unit, first
end

-- Returns the same for a node that gets service in tokens. Its children get equal service per weight, until they have no more jobs.
local function served_below(node, tokens)
  local rows, weights = {}, 0
  local num_children = redis.call('ZCARD', children(node, list))
  local step = math.max(1, math.ceil(num_children / max_keys))
  for at = 0, num_children - 1, step do
    local child = redis.call('ZRANGE', children(node, list), at, at)[1]
    local count, unit, first = jobs_of_key(child)
    if is_node(child) then
      local base = base_of(child)
      local num_below, unit_below, first_below = jobs_between('[' .. base .. '/', '(' .. base .. '0')
      if num_below > 0 then unit = (count * unit + num_below * unit_below) / (count + num_below) end
      count, first = count + num_below, first or first_below
    end
    local weight = weight_of(node, child)
    rows[#rows+1] = {need = count * unit * step, unit = unit, weight = weight * step, first = first}
    weights = weights + weight * step
  end
  table.sort(rows, function(a, b) return a.need / a.weight < b.need / b.weight end)
  local served, left = 0, tokens
  for _, row in ipairs(rows) do
    local given = math.min(row.need, left * row.weight / weights)
    served, left, weights = served + given / row.unit, left - given, weights - row.weight
  end
  return math.floor(served + 0.5), tokens - left, rows[1] and rows[1].first
end

local num_ahead = redis.call('ZLEXCOUNT', backlog, '[' .. key .. '\0', '(' .. own)
local _, own_cost, own_first = jobs_between('[' .. key .. '\0', '(' .. key .. '\1')
local cost, reply = num_ahead * own_cost, {0, num_urgent + num_held, own_first, num_ahead}
for i = #path, 1, -1 do
  local node, child = path[i].node, path[i].child
  local limit, siblings = path[i].service + cost / weight_of(node, child), children(node, list)
  local num_siblings = redis.call('ZCOUNT', siblings, '-inf', string.format('%.17g', limit))
  local step = math.max(1, math.ceil(num_siblings / max_keys))
  for at = 0, num_siblings - 1, step do
    local sibling, service = unpack(redis.call('ZRANGE', siblings, at, at, 'WITHSCORES'), 1, 2)
    if sibling ~= child then
      local served, added, first
      if is_node(sibling) then
        served, added, first = served_below(sibling, (limit - tonumber(service)) * weight_of(node, sibling))
      else
        served, added, first = served_of_key(sibling, tonumber(service), limit, weight_of(node, sibling), sibling < child)
      end
      num_ahead, cost = num_ahead + served * step, cost + added * step
      if served > 0 then reply[#reply+1], reply[#reply+2] = first, served * step end
    end
  end
end
reply[1] = num_urgent + num_held + num_ahead
return reply

--@ waiting_by_key
-- Returns the fairness keys of a backlog in order, each followed by its number of jobs.
-- KEYS: backlog. ARGV: maximum number of keys.
local reply, from = {}, '-'
for _ = 1, tonumber(ARGV[1]) do
  local member = redis.call('ZRANGEBYLEX', KEYS[1], from, '+', 'LIMIT', 0, 1)[1]
  if not member then return reply end
  local key = string.sub(member, 1, string.find(member, '\0', 1, true) - 1)
  from = '[' .. key .. '\1'
  reply[#reply+1], reply[#reply+2] = key, redis.call('ZLEXCOUNT', KEYS[1], '[' .. key .. '\0', '(' .. key .. '\1')
end
return reply
