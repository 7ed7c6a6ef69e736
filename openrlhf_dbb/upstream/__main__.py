"""Prints the rows of ``table.toml`` whose source has changed, with the new digest: python -m openrlhf_dbb.upstream"""

from openrlhf_dbb.upstream.table import digest, table

for row in table():
    if (now := digest(row.source)) != row.digest:
        print(f"{now} was {row.digest}  {row.source}: {row.name} is {row.how}, {row.why}")
