"""One step every half second: slower than any trainer, whose mount then says what it waits for.

    python slow_producer.py LAKE STEPS

Prints nothing: `stepfs status DIR` does.
"""

import io
import sys
import time

import numpy as np

from stepfs_producer import Producer

lake, steps = sys.argv[1], int(sys.argv[2])
with Producer(lake, producer_id="slow") as producer:
    for step in range(steps):
        time.sleep(0.5)
        file = io.BytesIO()
        np.save(file, np.full(1000, step))
        producer.append([file.getvalue()], position=step)
        producer.flush()
