-- One body from a file, sent by every connection; the figures as one line of JSON.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
for name, value in string.gmatch(os.getenv("BENCH_HEADERS"), "([^:\n]+): ([^\n]+)") do
  wrk.headers[name] = value
end

done = function(summary, latency, requests)
  local failed = summary.errors
  io.write(string.format(
    '\nFIGURES {"requests": %d, "duration_s": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    failed.connect + failed.read + failed.write + failed.status + failed.timeout))
end
