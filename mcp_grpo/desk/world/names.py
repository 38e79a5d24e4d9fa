"""Words for invented names of companies, people and products."""

STEMS = (
    "Abrinth", "Ackermoor", "Adelveen", "Aldwick", "Amberlot", "Anstrand", "Arcavale", "Ardenmoss", "Ashkeld", "Astrelle",
    "Avendon", "Balcrest", "Barrowen", "Bexholm", "Birkdale", "Blackfen", "Bramwell", "Brevik", "Brightmoor", "Brindlow",
    "Cadmore", "Calverton", "Candlewood", "Carrowby", "Castrel", "Cedarholt", "Chalmont", "Clarendel", "Cobaltane", "Copperidge",
    "Corvane", "Cragmere", "Cresthaven", "Dalbury", "Darrowin", "Delphane", "Densmere", "Dovrefell", "Drayhurst", "Dunmarrow",
    "Eastlane", "Ebbingham", "Eldergate", "Ellesmoor", "Elvaston", "Emberlyn", "Everstead", "Fairholt", "Falkmere", "Farrowdale",
    "Fennimore", "Ferncliff", "Finsbrook", "Foxglen", "Frostholm", "Galdrin", "Garnethill", "Gildersome", "Glenrath", "Goldmarsh",
    "Granmoor", "Greyfriar", "Halvorsted", "Harrowgate", "Hartsfell", "Hawksmere", "Heathrune", "Helmsby", "Highmarsh", "Hollowell",
    "Ironbeck", "Ivorane", "Jasperfield", "Juniperon", "Karstad", "Keldmoor", "Kestrane", "Kingsroke", "Lakemont", "Larkhurst",
    "Lindenau", "Lockridge", "Lorrimer", "Lumenfell", "Maplecroft", "Marlowe Bay", "Meadowick", "Millhaven", "Mistral Point", "Moorgrove",
    "Nethervale", "Nordhagen", "Oakhampton", "Oldmere", "Orlestone", "Ottermoor", "Palegrove", "Pembrick", "Pinecastle", "Quarrydene",
    "Quillmark", "Ravenscar", "Redmayne", "Ridgeholm", "Rookwood", "Rowanstead", "Saltmarsh", "Sandhurst Vale", "Selwynne", "Silverbeck",
    "Skelder", "Solvane", "Southmere", "Starholt", "Stonebridge Vale", "Stormont Ridge", "Sundermoor", "Tarnbeck", "Thistleden", "Thornquay",
    "Tidewell", "Tolmarsh", "Trevanion", "Umberlee", "Valdrin", "Verrinder", "Wainfleet", "Walderhey", "Wexmoor", "Whitcombe Lane",
    "Wilderbeck", "Windermoor", "Wolfdene", "Wrenfield", "Yarrowby", "Yewtree Point", "Zellmark", "Zephyrine",
)  # fmt: skip

CLASS_STEMS = (
    ("Voltaris", "Voltarra"), ("Merrowick", "Merroway"), ("Calderon Peak", "Calderonis"), ("Haldane", "Haldanor"),
    ("Tessaline", "Tessalon"), ("Brontide", "Brontique"), ("Lyrane", "Lyranova"), ("Sorrento Falls", "Sorrentis"),
    ("Pellworth", "Pellwyn"), ("Quintrel", "Quintressa"),
)  # fmt: skip
"""An issuer with two classes of shares, and another company whose symbol is nearly the same."""

TWIN_STEMS = (
    ("Keystrand", "Keystrom"), ("Marbrook", "Marbury"), ("Dunlevin", "Dunlever"), ("Orchardon", "Orchadia"),
    ("Petrellis", "Petrello"), ("Hexwick", "Hexworth"), ("Almondbury", "Almondane"), ("Cranleith", "Cranleigh Moor"),
)  # fmt: skip
"""Two companies that have the same letters as their symbol on different exchanges."""

PAIR_STEMS = (
    "Northwind", "Silverline", "Harborlight", "Greenmantle", "Bluewater", "Summitcrest", "Ironwood", "Clearbrook",
    "Redstone", "Goldenrod", "Eastgate", "Highland Star", "Riverstone", "Brightwater", "Stonegate", "Whitefield",
)  # fmt: skip

PAIR_NOUNS = (
    (("Logistics", "Freight & Logistics"), ("Logic", "Semiconductors")),
    (("Pharma", "Drug Manufacturers"), ("Farms", "Packaged Foods")),
    (("Solar", "Solar Equipment"), ("Solutions", "Application Software")),
    (("Marine", "Marine Shipping"), ("Marketing", "Advertising")),
    (("Foods", "Packaged Foods"), ("Footwear", "Apparel & Footwear")),
    (("Materials", "Specialty Chemicals"), ("Material Handling", "Industrial Machinery")),
    (("Energy", "Oil & Gas Production"), ("Energetics", "Electrical Equipment")),
    (("Medical", "Medical Devices"), ("Media", "Broadcasting")),
    (("Robotics", "Industrial Machinery"), ("Robust Insurance", "Property Insurance")),
    (("Aero", "Aerospace"), ("Aerated Concrete", "Building Materials")),
    (("Data", "Data Services"), ("Dairy", "Packaged Foods")),
    (("Power", "Regulated Electric"), ("Powertrain", "Auto Parts")),
)
"""Second words of two companies that share the first."""

INDUSTRIES = {
    "Application Software": ("Technology", "Software", "subscription software for planning, billing and compliance"),
    "Semiconductors": ("Technology", "Semiconductors", "mixed-signal chips for sensors and motor control"),
    "Data Services": ("Technology", "Data", "hosted databases and data feeds for insurers and utilities"),
    "Electrical Equipment": ("Industrials", "Electric", "switchgear, inverters and transformers"),
    "Industrial Machinery": ("Industrials", "Machinery", "packaging lines, presses and warehouse robots"),
    "Freight & Logistics": ("Industrials", "Freight", "road freight, cold storage and customs handling"),
    "Aerospace": ("Industrials", "Aerospace", "landing gear parts and cabin systems"),
    "Marine Shipping": ("Industrials", "Shipping", "feeder container ships and port terminals"),
    "Building Materials": ("Materials", "Building Products", "bricks, insulation and ready-mixed concrete"),
    "Specialty Chemicals": ("Materials", "Chemicals", "coatings, resins and water-treatment chemicals"),
    "Mining": ("Materials", "Mining", "copper and nickel mines and a smelter"),
    "Drug Manufacturers": ("Healthcare", "Therapeutics", "generic injectables and two medicines for asthma"),
    "Medical Devices": ("Healthcare", "Instruments", "infusion pumps, catheters and hospital monitors"),
    "Diagnostics": ("Healthcare", "Diagnostics", "laboratory tests and reading instruments"),
    "Packaged Foods": ("Consumer Defensive", "Foods", "frozen meals, cereals and dairy spreads"),
    "Household Products": ("Consumer Defensive", "Home Products", "detergents, candles and paper goods"),
    "Apparel & Footwear": ("Consumer Cyclical", "Outfitters", "work boots, rainwear and school uniforms"),
    "Auto Parts": ("Consumer Cyclical", "Motor Parts", "brakes, axles and battery housings"),
    "Specialty Retail": ("Consumer Cyclical", "Stores", "garden centres and hardware stores"),
    "Broadcasting": ("Communication Services", "Broadcasting", "regional television and podcast studios"),
    "Advertising": ("Communication Services", "Outdoor", "billboards and a platform for local advertising"),
    "Telecom Services": ("Communication Services", "Telecom", "fibre networks in mid-sized towns"),
    "Oil & Gas Production": ("Energy", "Petroleum", "onshore gas fields and a pipeline"),
    "Solar Equipment": ("Energy", "Solar", "solar trackers, panels and mounting frames"),
    "Regulated Electric": ("Utilities", "Utilities", "electricity networks for two million customers"),
    "Water Utilities": ("Utilities", "Water", "drinking water and sewage treatment"),
    "Regional Banks": ("Financial Services", "Bancorp", "savings accounts, mortgages and loans to small firms"),
    "Property Insurance": ("Financial Services", "Insurance", "insurance of homes, farms and small fleets"),
    "Real Estate Trusts": ("Real Estate", "Properties", "warehouses and student housing for rent"),
}
"""By industry: its sector, the second word of a name, and what such a company sells."""

GIVEN_NAMES = (
    "Adaeze", "Alina", "Amund", "Anselm", "Beatriz", "Bertrand", "Carys", "Catrin", "Corin", "Dagny", "Darius", "Delphine",
    "Edda", "Eleni", "Emeka", "Esther", "Farid", "Fiona", "Goran", "Greta", "Hamish", "Hedda", "Ignacio", "Imogen", "Isolde",
    "Jasper", "Joaquim", "Kaito", "Katya", "Leif", "Liora", "Magnus", "Marisol", "Nadia", "Niamh", "Odile", "Orson", "Petra",
    "Priya", "Quentin", "Rafael", "Rhona", "Saskia", "Silas", "Tamsin", "Teodor", "Ulrika", "Viggo", "Wanda", "Yusuf",
)  # fmt: skip

FAMILY_NAMES = (
    "Abernethy", "Albescu", "Aldenholt", "Baskerfield", "Bellhouse", "Brannock", "Carrowell", "Castellane", "Cheverton",
    "Dahlquist", "Delacorte", "Drummore", "Eikeland", "Elphick", "Fairbourne", "Falkenrath", "Fitzgarrow", "Galloway-Reed",
    "Grunewald", "Halloran", "Hathersage", "Hollingbury", "Ingleby", "Ivarsson", "Jankowiak", "Jessamine", "Kallistrate",
    "Kirkbride", "Lachmann", "Lindqvist", "Lovelace-Orr", "Marchetti", "Mbeki-Lane", "Montclair", "Nakagawa", "Norcross",
    "Oduya", "Osterhaus", "Pemberley", "Petrossian", "Quennell", "Radcliffe-Moss", "Rosenthorp", "Sandoval", "Skarsgaard",
    "Soderholm", "Tanaka-Wells", "Thackeray", "Tregarthen", "Ullenhall", "Vandermeer", "Vasquez-Dunn", "Wainwright",
    "Westerhout", "Whitlock", "Winterbourne", "Yamashiro", "Zabriskie",
)  # fmt: skip

TOWNS = (
    "Aldermouth", "Ashby Falls", "Bellharbor", "Birchport", "Brackenridge", "Cairnhaven", "Cedar Notch", "Coldwater Bend",
    "Dunharrow", "Eastmarch", "Elkstone", "Fallowfield", "Fort Lanyon", "Gannet Bay", "Glassford", "Grayling", "Hadley Cross",
    "Highport", "Inverlade", "Kelstow", "Lakeminster", "Larchmont Hill", "Lowmoor", "Marrowby", "Millbank City", "Newfold",
    "Norchester", "Oakum", "Port Ellery", "Port Varrow", "Quayside", "Ravensford", "Redcliff Junction", "Saltash Point",
    "Sandmere", "Stavely", "Sternwick", "Tarrant Bay", "Thornaby Wells", "Upper Wick", "Vale Harbor", "Westermouth",
    "Whitsand", "Yarrow City",
)  # fmt: skip
