"""FastAPI with a batcher of the usual kind: a queue, one task that gathers, the model in a thread."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from session import DELAY_MS, MAX_BATCH, open_model, row_of

run = open_model()
queue: asyncio.Queue = asyncio.Queue()


async def gather() -> None:
    loop = asyncio.get_running_loop()
    while True:
        batch = [await queue.get()]
        deadline = loop.time() + DELAY_MS / 1000
        while len(batch) < MAX_BATCH:
            if queue.empty():
                try:
                    batch.append(await asyncio.wait_for(queue.get(), deadline - loop.time()))
                except TimeoutError:
                    break
            else:
                batch.append(queue.get_nowait())
        answers = await asyncio.to_thread(run, np.stack([row for row, _ in batch]))
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer.tobytes())


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(gather())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(request: Request) -> Response:
    future = asyncio.get_running_loop().create_future()
    queue.put_nowait((row_of(await request.body()), future))
    return Response(await future, media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", access_log=False)
