"""`vllm bench serve` with its own arguments, also where the build is named otherwise than its command expects."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
