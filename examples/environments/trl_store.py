"""A class as TRL's `environment_factory` takes it: `reset`, tools with type hints, `reward`."""

PRICES = {"apple": 3, "bread": 4, "cheese": 7, "dates": 5, "eggs": 2}


class Store:
    def reset(self, **row) -> str | None:
        self.basket: list[str] = []
        self.item, self.budget = row["item"], row["budget"]
        self.reward, self.done = 0.0, False
        return f" You have {self.budget} coins."

    def get_price(self, item: str) -> int:
        """Look up the price of an item.

        Args:
            item: Its name in lower case.
        """
        return PRICES[item]

    def buy(self, item: str, amount: int = 1) -> str:
        """Buy an item. The shopping ends with it.

        Args:
            item: Its name in lower case.
            amount: How many.
        """
        if PRICES[item] * amount > self.budget:
            raise ValueError(f"{amount} {item} cost {PRICES[item] * amount} coins")
        self.done, self.reward = True, float(item == self.item)
        return f"Sold: {amount} {item}."
