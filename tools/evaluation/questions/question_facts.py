"""What the questions of common knowledge stand on: facts that are written down here by hand, each
in one place. Tables give a right answer for each key; wrong options are answers to other keys, but
for those that a reader could defend (`conflicts`). The rest has its wrong options beside it.
"""

from __future__ import annotations

from typing import NamedTuple


class FactTable(NamedTuple):
    """Questions of one form."""

    subject: str
    source: str
    """Where each answer can be looked up."""
    form: str
    """The question, with the key for {}."""
    facts: dict[str, str]
    conflicts: dict[str, str] = {}
    """Key -> answers to others, with spaces between, that are no wrong options here."""


def _pairs(text: str) -> dict[str, str]:
    return {key.strip(): value.strip() for key, _, value in
            (pair.partition(":") for pair in text.replace("\n", " ").split(","))}


TABLES = (
    FactTable("geography", "geography: capital cities", "What is the capital of {}?", _pairs("""
        France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon,
        Greece: Athens, Austria: Vienna, Poland: Warsaw, Sweden: Stockholm, Norway: Oslo,
        Denmark: Copenhagen, Finland: Helsinki, Ireland: Dublin,
        Belgium: Brussels, Russia: Moscow, Turkey: Ankara, Egypt: Cairo, Kenya: Nairobi,
        Japan: Tokyo, China: Beijing, Thailand: Bangkok, Vietnam: Hanoi,
        Canada: Ottawa, Mexico: Mexico City, Peru: Lima,
        Argentina: Buenos Aires, Australia: Canberra, New Zealand: Wellington,
        the United Kingdom: London, South Korea: Seoul""")),
    FactTable("geography", "geography: continents", "On which continent is {}?", _pairs("""
        France: Europe, Germany: Europe, Poland: Europe, Sweden: Europe, Japan: Asia,
        India: Asia, Vietnam: Asia, Mongolia: Asia, Kenya: Africa, Nigeria: Africa,
        Morocco: Africa, Ghana: Africa, Brazil: South America, Peru: South America,
        Chile: South America, Canada: North America, Mexico: North America""")),
    FactTable("geography", "geography: currencies", "What is the currency of {}?", _pairs("""
        Japan: the yen, India: the rupee, China: the yuan, Russia: the ruble,
        Mexico: the peso, Switzerland: the franc, the United States: the dollar,
        Germany: the euro, Poland: the zloty, the United Kingdom: the pound""")),
    FactTable("language", "language: antonyms", "What is the opposite of {}?", _pairs("""
        hot: cold, big: small, up: down, fast: slow, light: dark, wet: dry, happy: sad,
        open: closed, early: late, full: empty, young: old, strong: weak, loud: quiet,
        clean: dirty, rich: poor, win: lose, buy: sell, push: pull,
        near: far, true: false"""),
        {"loud": "weak", "strong": "small", "rich": "weak empty", "big": "weak", "fast": "late",
         "full": "poor", "up": "far", "young": "late", "early": "slow"}),
    FactTable("language", "language: irregular verbs", "What is the past tense of the verb \"{}\"?",
              _pairs("""
        go: went, see: saw, eat: ate, run: ran, take: took, give: gave, write: wrote,
        swim: swam, buy: bought, think: thought, bring: brought, fly: flew""")),
    FactTable("language", "language: irregular plurals", "What is the plural of the word \"{}\"?",
              _pairs("""
        child: children, man: men, woman: women, mouse: mice, foot: feet, tooth: teeth,
        goose: geese, leaf: leaves, knife: knives, wolf: wolves""")),
    FactTable("animals", "animals: names of the young", "What is a young {} called?", _pairs("""
        dog: a puppy, cat: a kitten, cow: a calf, horse: a foal, sheep: a lamb, goat: a kid,
        pig: a piglet, duck: a duckling, hen: a chick, goose: a gosling, bear: a cub,
        deer: a fawn, frog: a tadpole, kangaroo: a joey"""),
        {"duck": "chick", "goose": "chick", "deer": "calf kid", "dog": "cub", "goat": "lamb"}),
    FactTable("animals", "animals: their calls", "What sound does {} make?", _pairs("""
        a cow: moo, a dog: bark, a cat: meow, a duck: quack, a sheep: baa, a lion: roar,
        a snake: hiss, a pig: oink, a bee: buzz, an owl: hoot"""),
        {"a cat": "hiss roar", "a lion": "meow", "a dog": "roar"}),
    FactTable("science", "chemistry: the periodic table", "What is the chemical symbol of {}?",
              _pairs("""
        hydrogen: H, oxygen: O, carbon: C, nitrogen: N, iron: Fe, gold: Au, silver: Ag,
        sodium: Na, calcium: Ca, helium: He""")),
    FactTable("culture", "literature: authors", "Who wrote {}?", _pairs("""
        Romeo and Juliet: William Shakespeare, Oliver Twist: Charles Dickens,
        Pride and Prejudice: Jane Austen, War and Peace: Leo Tolstoy,
        Don Quixote: Miguel de Cervantes, The Odyssey: Homer, Faust: Goethe,
        The Adventures of Tom Sawyer: Mark Twain, Frankenstein: Mary Shelley,
        The Old Man and the Sea: Ernest Hemingway""")),
    FactTable("everyday", "everyday: occupations", "What do we call a person who {}?", _pairs("""
        flies an aeroplane: a pilot, teaches children at school: a teacher,
        bakes bread: a baker, puts out fires: a firefighter, repairs teeth: a dentist,
        cuts hair: a barber, grows crops: a farmer, paints pictures: a painter,
        treats sick animals: a vet"""),
        {"treats sick animals": "farmer"}),
)


class Written(NamedTuple):
    """One question with its own wrong options."""

    subject: str
    source: str
    question: str
    options: tuple[str, str, str, str]
    """The right one first."""


def _written(subject: str, source: str, text: str) -> list[Written]:
    """Lines of "question | right | wrong | wrong | wrong"; one that ends in | goes on."""
    found = []
    for line in filter(None, map(str.strip, text.replace("|\n", "|").splitlines())):
        question, right, *wrong = (part.strip() for part in line.split("|"))
        one, two, three = wrong
        found.append(Written(subject, source, question, (right, one, two, three)))
    return found


WRITTEN = [
    *_written("science", "physics and chemistry: school books", """
        What is water made of? | hydrogen and oxygen |
            iron and gold | salt and sand | carbon and lead
        At what temperature in degrees Celsius does water freeze at sea level? | 0 | 50 | 75 | 100
        What is frozen water called? | ice | steam | sand | smoke
        What does water become when it boils? | steam | ice | sand | glass
        What force pulls objects towards the ground? | gravity | friction | sound | electricity
        Which metal is attracted by a magnet? | iron | gold | silver | copper
        Which gas do people need to breathe in order to live? | oxygen |
            helium | neon | carbon monoxide
        What do we use to measure temperature? | a thermometer | a ruler | a clock | a scale
        What travels fastest? | light | sound | a car | a bullet
        What is H2O? | water | salt | sugar | oil"""),
    *_written("science", "biology: school books", """
        Which organ pumps blood through the body? | the heart | the liver | the stomach | the skin
        Which organ do we use to think? | the brain | the heart | the lungs | the kidneys
        Which organs do people breathe with? | the lungs | the kidneys | the bones | the ears
        What do plants need to make their food? | sunlight | milk | meat | paper
        Which part of a plant takes up water from the soil? | the roots |
            the flowers | the fruit | the seeds
        How many legs does a spider have? | eight | two | four | six
        How many legs does an insect have? | six | two | four | eight
        Which of these animals is a mammal? | a whale | a shark | a chicken | a frog
        Which of these animals is a bird? | a penguin | a bat | a whale | a bee
        Which of these animals is an insect? | an ant | a mouse | a frog | a snake
        Which animal gives us wool? | a sheep | a snake | a fish | a frog
        Which animal makes honey? | a bee | a cow | a spider | a fish
        What do cows eat? | grass | fish | stones | birds
        Which animal has a very long neck? | a giraffe | a pig | a mouse | a frog
        Which animal has a trunk? | an elephant | a lion | a horse | a rabbit
        Which animal spins a web? | a spider | a dog | a cow | a horse
        What do caterpillars turn into? | butterflies | birds | fish | worms
        How many eyes do most people have? | two | one | three | five
        What covers the body of a bird? | feathers | scales | wool | leaves
        What do fish use to breathe under water? | gills | wings | feathers | ears"""),
    *_written("science", "astronomy: school books", """
        Which planet do we live on? | Earth | Mars | Venus | Jupiter
        What is at the centre of our solar system? | the Sun | the Moon | Mars | Earth
        Which planet is known as the red planet? | Mars | Venus | Saturn | Neptune
        Which is the largest planet of the solar system? | Jupiter | Mercury | Earth | Mars
        What does the Moon orbit? | the Earth | Mars | Jupiter | Venus
        Who was the first person to walk on the Moon? | Neil Armstrong |
            Albert Einstein | Isaac Newton | Charles Darwin
        How long does the Earth take to go once around the Sun? | one year |
            one day | one week | one month"""),
    *_written("geography", "geography: atlas", """
        What is the largest ocean on Earth? | the Pacific Ocean |
            the Atlantic Ocean | the Indian Ocean | the Arctic Ocean
        What is the highest mountain on Earth? | Mount Everest |
            Mont Blanc | Mount Fuji | Kilimanjaro
        Which country has the shape of a boot? | Italy | France | Norway | Japan
        In which country are the pyramids of Giza? | Egypt | Mexico | China | France
        In which city is the Eiffel Tower? | Paris | London | Rome | Berlin
        In which country is the Great Wall? | China | Brazil | Spain | Canada
        Which river flows through London? | the Thames | the Nile | the Amazon | the Danube
        Which language is spoken in Brazil? | Portuguese | Japanese | German | Russian
        Which desert is in the north of Africa? | the Sahara | the Gobi | the Atacama | the Mojave
        Where does the Sun rise? | in the east | in the west | in the north | in the south"""),
    *_written("history", "history: encyclopaedia", """
        Who was the first president of the United States? | George Washington |
            Abraham Lincoln | John Kennedy | Thomas Jefferson
        In which year did the Second World War end? | 1945 | 1918 | 1815 | 1969
        Who painted the Mona Lisa? | Leonardo da Vinci |
            Vincent van Gogh | Pablo Picasso | Claude Monet
        Who developed the theory of relativity? | Albert Einstein |
            Charles Darwin | Napoleon | Mozart
        Who proposed the theory of evolution by natural selection? | Charles Darwin |
            Albert Einstein | Galileo | Plato
        Which people built the Colosseum? | the Romans | the Vikings | the Aztecs | the Chinese
        Which explorer sailed from Spain to America in 1492? | Christopher Columbus |
            Marco Polo | James Cook | Neil Armstrong
        What was the profession of Mozart? | composer | painter | dentist | sailor"""),
    *_written("everyday", "everyday: common use of things", """
        What do you use to cut paper? | scissors | a spoon | a pillow | a candle
        What do you use to write on paper? | a pencil | a fork | a shoe | a cup
        What do you wear on your feet? | shoes | gloves | a hat | a scarf
        What do you wear on your hands when it is cold? | gloves | shoes | glasses | socks
        What do you use to open a locked door? | a key | a spoon | a pillow | a book
        What do you use when it rains? | an umbrella | a lamp | a fork | a pillow
        What do people sleep in? | a bed | a bottle | a fridge | a drawer
        What do you use to eat soup? | a spoon | a knife | a pencil | a comb
        Where do you keep food cold? | in the fridge | in the oven | in the bed | in the car
        What do you use to tell the time? | a clock | a spoon | a ruler | a mirror
        Which of these is a fruit? | an apple | a carrot | a potato | an onion
        Which of these is a vegetable? | a carrot | a banana | an apple | a cherry
        Which of these is a drink? | tea | bread | cheese | rice
        What is bread made from? | flour | sand | wood | wool
        What is cheese made from? | milk | apples | rice | water
        Where do you borrow books? | at a library | at a bakery | at a hospital | at a farm
        Where do you go when you are very ill? | to the hospital |
            to the cinema | to the bakery | to the zoo
        What do you use to call somebody who is far away? | a telephone |
            a hammer | a blanket | a brush
        What do you use to drive a nail into wood? | a hammer | a sponge | a spoon | a towel
        What do you use to brush your teeth? | a toothbrush | a hammer | a fork | a towel
        Which vehicle runs on rails? | a train | a car | a ship | a bicycle
        Which vehicle travels on water? | a ship | a train | a bicycle | a bus
        How many wheels does a bicycle have? | two | three | four | six"""),
    *_written("everyday", "everyday: colours of well-known things", """
        What colour is a ripe banana? | yellow | blue | purple | black
        What colour is grass? | green | red | blue | white
        What colour is fresh snow? | white | green | red | black
        What colour is the sky on a clear day? | blue | green | brown | black
        What colour is blood? | red | blue | green | yellow
        What colour is coal? | black | white | yellow | green
        Which colour do you get if you mix blue and yellow paint? | green | red | black | white
        Which colour means stop at a traffic light? | red | green | blue | white"""),
    *_written("everyday", "everyday: calendar and clock", """
        How many days are there in a week? | seven | five | ten | twelve
        How many months are there in a year? | twelve | ten | seven | twenty
        How many hours are there in a day? | 24 | 12 | 48 | 60
        How many minutes are there in an hour? | 60 | 100 | 24 | 12
        How many seconds are there in a minute? | 60 | 100 | 24 | 10
        Which day comes after Monday? | Tuesday | Sunday | Friday | Thursday
        Which day comes after Friday? | Saturday | Monday | Sunday | Wednesday
        Which month comes after March? | April | January | August | December
        Which month comes after June? | July | March | October | February
        Which is the first month of the year? | January | May | September | December
        Which is the last month of the year? | December | June | March | January
        Which season is the coldest? | winter | summer | spring | autumn"""),
]
