// 64 users who ask again and again, streamed and whole in turns; every reply must be complete.
import { check } from "k6";
import http from "k6/http";

export const options = {
  vus: 64,
  duration: __ENV.DURATION,
  gracefulStop: "30s",
  thresholds: { checks: ["rate==1"], http_req_failed: ["rate==0"] },
};

const tokens = 64;

export default function () {
  const seed = __VU * 100000 + __ITER;
  const stream = __ITER % 2 === 0;
  const asked = { prompt: `user ${__VU} asks`, seed, max_tokens: tokens, ignore_eos: true, stream };
  if (stream) asked.stream_options = { include_usage: true };
  const headers = { "Content-Type": "application/json" };
  const reply = http.post(`${__ENV.URL}/v1/completions`, JSON.stringify(asked), { headers, timeout: "60s" });
  check(reply, {
    "status is 200": (r) => r.status === 200,
    "whole": (r) => {
      if (r.status !== 200) return false;
      if (!stream) return r.json("usage.completion_tokens") === tokens;
      return r.body.includes(`"completion_tokens":${tokens},`) && r.body.endsWith("data: [DONE]\n\n");
    },
  });
}
