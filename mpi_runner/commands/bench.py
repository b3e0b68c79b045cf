"""`bench`: how fast an engine is on this machine."""

import json

from ..exit_codes import MISMATCH, PASS


def add(subparsers):
    parser = subparsers.add_parser(
        "bench", help="how fast an engine is here",
        description="numpy: forward and backward of one shape beside the rate of this machine's matrix product. cuda: "
                    "the forward's shapes A to L on the current device, checked first, beside installed peers. Exit "
                    "code 1 when a result fails its check; nothing is timed then.")
    parser.add_argument("--engine", choices=("numpy", "cuda"), default="numpy")
    parser.add_argument("--tokens", type=int, default=2048, help="numpy: tokens (2048)")
    parser.add_argument("--heads", type=int, default=16, help="numpy: heads of size 128 (16)")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", metavar="A", help="cuda: which shapes (all)")
    parser.add_argument("--output", default=".", help="cuda: folder for forward.json and forward.md (.)")
    parser.add_argument("--json", action="store_true", help="numpy: as JSON")
    parser.set_defaults(run=main)


def main(args):
    if args.engine == "cuda":
        return _cuda(args)
    from kda_engine.bench.cpu import measure

    result = measure(args.tokens, args.heads, args.samples)
    if args.json:
        print(json.dumps(result))
    else:
        print(f"1 x {result['tokens']} x {result['heads']}, head size 128, float32, {result['threads']} threads")
        print(f"error against the float64 recurrence  {result['error']:.1e}")
        if result["forward_seconds"] is not None:
            print(f"forward                               {result['forward_seconds']:.3f} s")
            print(f"forward + backward                    {result['forward_backward_seconds']:.3f} s")
        print(f"2048^3 float32 matrix product         {result['matrix_rate'] / 1e9:.0f} GFLOP/s")
        if (args.tokens, args.heads) == (2048, 16):
            print(f"forward target at that rate           {result['target_seconds']:.3f} s")
    return MISMATCH if result["forward_seconds"] is None else PASS


def _cuda(args):
    from kda_engine.bench import forward
    from kda_engine.engines import make_engine

    make_engine("cuda")
    shapes = ["--shapes", *args.shapes] if args.shapes else []
    forward.main([*shapes, "--samples", str(max(args.samples, 30)), "--output", args.output])
    return PASS
