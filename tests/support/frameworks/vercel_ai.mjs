// Vercel's AI SDK, streamed: Responses for OpenAI's models, Messages for Anthropic's.
import { text } from "node:stream/consumers";
import { anthropic } from "@ai-sdk/anthropic";
import { openai } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const models = {
  openai: openai(process.env.OPENAI_MODEL),
  anthropic: anthropic(process.env.ANTHROPIC_MODEL),
};
const weather = tool({
  description: "Tell the weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `${city}: rain`,
});
const history = [];
for (const message of JSON.parse(await text(process.stdin)).messages) {
  history.push(message);
  const answer = streamText({
    model: models[process.argv[2]],
    system: "Be brief.",
    messages: history,
    tools: { weather },
    stopWhen: stepCountIs(5),
    onError: ({ error }) => { throw error; },
  });
  for await (const piece of answer.textStream) process.stdout.write(piece);
  history.push(...(await answer.responseMessages));
}
