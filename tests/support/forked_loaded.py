"""What the server of `forked` has imported and read before it forks a command: nearly all that commands need."""

import gc
import os

import boto3  # noqa: F401
import forkedworkers  # noqa: F401
import numpy as np  # noqa: F401
import trio_parallel  # noqa: F401
import yaml  # noqa: F401

import stepfs.mount.daemon.session  # noqa: F401
import stepfs_producer.cli.app
import stepfs_producer.payloads.files
import stepfs_producer.run.history.lineage
import stepfs_producer.run.session
import stepfs_producer.sources.reading
import stepfs_producer.transforms.records  # noqa: F401
from stepfs.store.s3.clients import choose

os.environ.pop("AWS_PROFILE", None)  # of the test that happens to be the first; each command has its own environment
choose(None, None).session.client("s3", "us-east-1").close()  # botocore's description of S3 stays

gc.collect()
gc.freeze()  # what is forked need not look at it, nor copy it
