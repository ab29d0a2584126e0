"""A source of one's own for plans: the captions in WebDataset shards, which stepfs has no reader for.

    sources:
      captions: {format: "tar_captions:Captions", files: shards/, options: {field: txt}}

This file stands beside the plan, or anywhere on PYTHONPATH. The class gets each file opened, and yields (number, text) of
each record, always the same of the same file: then order, shares, restarts and skipped records are stepfs's business.
webdataset_to_lake.sh runs it. MosaicML's MDS shards, or a format of your house, are read in the same way.
"""

import tarfile

from stepfs_producer import Bad


class Captions:
    suffixes = (".tar",)  # what it takes from a directory

    def __init__(self, field="txt"):  # the plan's `options`
        self.ending = f".{field}"

    def records(self, file, part):  # `part` is for formats whose files can be read in parts
        with tarfile.open(fileobj=file) as tar:
            for entry in tar:
                if not entry.name.endswith(self.ending):
                    continue
                text = tar.extractfile(entry).read()
                try:
                    yield entry.offset, text.decode()
                except UnicodeDecodeError:
                    yield entry.offset, Bad("no UTF-8")  # counted, and skipped where the plan says so
