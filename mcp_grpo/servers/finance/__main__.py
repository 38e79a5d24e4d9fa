"""Starts the finance server: `python -m mcp_grpo.servers.finance`."""

from mcp_grpo.servers.finance.backend import FinanceBackend
from mcp_grpo.servers.finance.server import make_server
from mcp_grpo.servers.serving import parser, refuse, serve


def main() -> None:
    """Read the options, and serve."""
    options = parser("finance", "Quotes, prices, profiles, statements, key metrics, splits and symbol search.")
    options.add_argument(
        "--backend",
        choices=("recorded", "fmp", "polygon"),
        default="recorded",
        help="where data is from: the invented market, or a vendor's API with a key from the environment",
    )
    options.add_argument("--seed", type=int, default=0, help="which invented market, with --backend recorded")
    chosen = options.parse_args()
    try:
        backend = _backend(chosen.backend, chosen.seed)
    except ValueError as error:  # such as a key that is missing
        refuse(str(error))
    serve(make_server(backend), chosen)


def _backend(name: str, seed: int) -> FinanceBackend:
    # Imported here: what one source needs is not loaded for another.
    if name == "fmp":
        from mcp_grpo.servers.finance.fmp import FMPBackend

        return FMPBackend()
    if name == "polygon":
        from mcp_grpo.servers.finance.polygon import PolygonBackend

        return PolygonBackend()
    from mcp_grpo.servers.finance.recorded import RecordedFinance
    from mcp_grpo.servers.world.market import Market

    return RecordedFinance(Market(seed))


if __name__ == "__main__":
    main()
