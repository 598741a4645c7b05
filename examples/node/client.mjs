// Stream a text from another language: the protos are the whole contract.
//
//   cd examples/node && npm install
//   node client.mjs --coordinator 127.0.0.1:50051 [--protos ../../protos]

import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const here = path.dirname(fileURLToPath(import.meta.url));
const { values } = parseArgs({
  options: {
    coordinator: { type: 'string', default: '127.0.0.1:50051' },
    protos: { type: 'string', default: path.join(here, '..', '..', 'protos') },
    prompt: { type: 'string', default: 'Once upon a time' },
  },
});

const definition = protoLoader.loadSync('paceline/v1/generation_service.proto', {
  includeDirs: [values.protos],
  longs: String, // a seed has 64 bits, more than a number holds
  enums: String,
  defaults: true,
  oneofs: true, // `event` names the field that is set
});
const { GenerationService } = grpc.loadPackageDefinition(definition).paceline.v1;
const client = new GenerationService(values.coordinator, grpc.credentials.createInsecure());

const call = client.Generate({
  prompt: values.prompt,
  sampling: { temperature: 0.8, topP: 0.95 }, // fields that are left out have the defaults of docs/sampling.md
  seed: '7',
  maxNewTokens: 48,
});

call.on('data', (response) => {
  if (response.event === 'started') {
    console.error(`model ${response.started.model}, seed ${response.started.seed}`);
  } else if (response.event === 'tokens') {
    process.stdout.write(response.tokens.text);
  } else {
    const { text, reason, stats } = response.finished;
    process.stdout.write(`${text}\n`);
    console.error(`${stats.committed} tokens in ${stats.rounds} rounds, finished by ${reason}`);
  }
});
call.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on('end', () => client.close());
