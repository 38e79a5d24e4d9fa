"""Financial data: quotes, prices, profiles, statements, key metrics, splits and symbol search."""
