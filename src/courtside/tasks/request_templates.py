"""Thousands of everyday requests: templates filled with topics that fit them.

Every template reads as English with every topic of its family: a thing is written both as one
("a volcano") and in general ("volcanoes"; the same words for "the moon" or "honey"). The requests
ask for little, so that a model of any size can answer in a sentence or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    templates: tuple[str, ...]
    """With the slot {one}, or {many} for things in general."""
    topics: tuple[str, ...]
    """`one/many`, or a single form that serves as both."""

    def requests(self) -> Iterator[str]:
        for template in self.templates:
            for topic in self.topics:
                singular, _, plural = topic.partition("/")
                yield template.format(one=singular, many=plural or singular)


def _topics(text: str) -> tuple[str, ...]:
    return tuple(" ".join(topic.split()) for topic in text.split(","))


THINGS = Family(
    templates=(
        "What is {one}?",
        "Describe {one} in a few words.",
        "Tell me something interesting about {many}.",
        "How would you explain to a child what {one} is?",
        "Give me a fact about {many}.",
        "What should everyone know about {many}?",
        "Why do people care about {many}?",
        "What makes {many} special?",
        "What comes to mind when you think of {many}?",
        "What is a good question to ask an expert on {many}?",
        "What is the best thing about {many}?",
        "How would a poet describe {one}?",
        "What do many people get wrong about {many}?",
        "Suggest a title for a book about {many}.",
        "What would a picture of {one} show?",
        "What is {one} similar to?",
        "What would a museum guide say about {many}?",
        "Write a short riddle about {one}.",
        "I know nothing about {many}. Where should I start?",
        "What question would a curious child ask about {many}?",
        "Can you give me a quick summary of what {one} is?",
        "Name two words that go well with {one}.",
    ),
    topics=_topics(
        """a volcano/volcanoes, the moon, a rainbow/rainbows, honey, a bicycle/bicycles, gravity,
        a lighthouse/lighthouses, coffee, a butterfly/butterflies, the ocean, a compass/compasses,
        bread, an elephant/elephants, a glacier/glaciers, paper, a telescope/telescopes, the sun,
        a violin/violins, salt, a spider/spiders, an earthquake/earthquakes, chocolate,
        a sailing boat/sailing boats, wool, a penguin/penguins, a waterfall/waterfalls, glass,
        the alphabet, a library/libraries, a snowflake/snowflakes, tea, an octopus/octopuses,
        a windmill/windmills, gold, a mushroom/mushrooms, a desert/deserts, soap,
        a calendar/calendars, an eagle/eagles, a bridge/bridges, cheese,
        a thunderstorm/thunderstorms, a piano/pianos, rice, a whale/whales, the wind,
        a clock/clocks, cotton, a cactus/cactuses, an island/islands, a mirror/mirrors, ice,
        a steam engine/steam engines, a tulip/tulips, a map/maps, rubber,
        a coral reef/coral reefs, a ladder/ladders, sugar, a bat/bats, the night sky,
        a drum/drums, clay, an owl/owls, a train/trains, a candle/candles, an onion/onions,
        a river/rivers, steel, a sunflower/sunflowers, a kite/kites, a rainforest/rainforests,
        an umbrella/umbrellas, a magnet/magnets, pepper, a dolphin/dolphins, a castle/castles,
        a lemon/lemons, fog, a passport/passports, an ant/ants, a market/markets, silver,
        a tortoise/tortoises, a tent/tents, an airport/airports, cinnamon, a guitar/guitars,
        a hedgehog/hedgehogs, a swamp/swamps, a zipper/zippers, a comet/comets, leather,
        a crossword puzzle/crossword puzzles, an acorn/acorns, a satellite/satellites, milk,
        a fossil/fossils, a hurricane/hurricanes, a key/keys"""
    ),
)

ACTIVITIES = Family(
    templates=(
        "Give me a tip about {one}.",
        "How do I get better at {one}?",
        "Why do some people enjoy {one}?",
        "What do I need for {one}?",
        "What is the hardest part of {one}?",
        "What is a common mistake when {one}?",
        "How would you describe {one} to someone who has never tried it?",
        "Is {one} a good way to spend an afternoon?",
        "Write a friendly note inviting a neighbor to try {one}.",
        "What should I remember when {one}?",
        "What could go wrong when {one}?",
        "How long does it take to get good at {one}?",
        "Give me a reason to try {one}.",
        "Can you encourage someone who is nervous about {one}?",
        "What does {one} teach you?",
        "What should I do first when {one}?",
        "Suggest a name for a club devoted to {one}.",
        "What is a good time of day for {one}?",
    ),
    topics=_topics(
        """cooking rice, swimming in the sea, baking bread, riding a bicycle, planting tomatoes,
        writing a letter, painting a wall, taking photographs, playing chess, running in the rain,
        knitting a scarf, making tea, hiking in the mountains, reading to children,
        growing herbs, washing a car, camping in the forest, learning a new language,
        playing the guitar, cleaning windows, building a shelf, fishing in a lake,
        telling jokes, packing a suitcase, walking a dog, drawing animals, singing in a choir,
        sewing on a button, watching birds, making soup, planning a picnic, keeping a diary,
        solving puzzles, folding paper boats, ironing a shirt, sailing a small boat,
        decorating a cake, playing table tennis, giving a speech, wrapping presents,
        feeding ducks, fixing a flat tire, making jam, skating on ice, juggling three balls,
        tidying a desk, dancing in a group, climbing trees, collecting stamps, mowing the lawn,
        roasting vegetables, flying a kite, studying for an exam, building a sandcastle,
        making pancakes, cutting hair, cycling to work, raising chickens, pitching a tent,
        stretching in the morning, paddling a canoe, carving a pumpkin, brewing coffee,
        telling bedtime stories, reading a map, picking apples, polishing shoes,
        throwing a frisbee, painting portraits, arranging flowers"""
    ),
)

SCENES = Family(
    templates=(
        "Describe {one} in one or two sentences.",
        "What does {one} sound like?",
        "What might I see during {one}?",
        "What is a good way to prepare for {one}?",
        "What is the best part of {one}?",
        "Write the first line of a story set during {one}.",
        "How can I make the most of {one}?",
        "What mood does {one} put people in?",
        "Suggest a song title that fits {one}.",
        "What do people talk about during {one}?",
        "Tell me how {one} usually ends.",
        "Why might someone look forward to {one}?",
    ),
    topics=_topics(
        """a rainy day, a birthday party, a walk on the beach, the first day of school,
        a long train journey, a quiet Sunday morning, a snowy evening, a village fair,
        a family dinner, a trip to the zoo, a summer vacation, a football match,
        a visit to the dentist, a garden party, an evening by the fire, a school play,
        a night at the opera, a winter walk, a day at the office, a morning at the harbor,
        a picnic in the park, a street festival, a boat trip, a wedding, a job interview,
        a heat wave, an autumn afternoon, a morning at the farmers' market, a camping weekend,
        a lazy afternoon, a concert in the open air, a visit from an old friend,
        a stormy night, a museum tour, a hike before sunrise, a neighborhood barbecue,
        a ride in a hot-air balloon, a night under the stars, a bus ride through the city,
        a game of cards, a day on the farm, a cooking class, a spelling contest, a parade,
        a tea party, a chess tournament, a reunion with cousins, a bicycle race,
        a treasure hunt, a moonlit stroll"""
    ),
)

REQUESTS = (*THINGS.requests(), *ACTIVITIES.requests(), *SCENES.requests())
