"""Paragraphs in the languages of questions, and texts in none of them."""

PARAGRAPHS = {
    "en": """
When the new canal was opened, most of the ships that had sailed around the cape began to use it at once. The journey
was shorter by several weeks, and the insurance cost less than before. Some of the old ports did not recover from the
change. Others were enlarged, because coal for the steamers had to be stored somewhere along the way. In the following
years the owners of the canal raised their prices more than once, but few captains went back to the long route.
""",
    "de": """
Als der neue Kanal eröffnet wurde, benutzten ihn die meisten Schiffe sofort, die bis dahin um das Kap gefahren waren.
Die Reise war nun um mehrere Wochen kürzer, und die Versicherung kostete weniger als zuvor. Einige der alten Häfen
erholten sich nicht von dieser Veränderung. Andere wurden ausgebaut, weil die Kohle für die Dampfer irgendwo auf dem
Weg gelagert werden musste. In den folgenden Jahren erhöhten die Eigentümer des Kanals mehr als einmal ihre Preise.
""",
    "fr": """
Quand le nouveau canal fut ouvert, la plupart des navires qui faisaient le tour du cap commencèrent aussitôt à
l'emprunter. Le voyage était plus court de plusieurs semaines, et l'assurance coûtait moins cher qu'avant. Quelques-uns
des anciens ports ne se remirent pas de ce changement. D'autres furent agrandis, parce que le charbon des vapeurs
devait être stocké quelque part sur la route. Dans les années suivantes, les propriétaires du canal augmentèrent plus
d'une fois leurs prix, mais peu de capitaines revinrent à la longue route.
""",
    "es": """
Cuando se abrió el nuevo canal, la mayoría de los barcos que hasta entonces rodeaban el cabo empezaron a usarlo
enseguida. El viaje era varias semanas más corto, y el seguro costaba menos que antes. Algunos de los viejos puertos no
se recuperaron del cambio. Otros se ampliaron, porque el carbón para los vapores tenía que guardarse en algún lugar del
camino. En los años siguientes los dueños del canal subieron sus precios más de una vez, pero pocos capitanes volvieron
a la ruta larga.
""",
    "it": """
Quando il nuovo canale fu aperto, la maggior parte delle navi che fino ad allora avevano fatto il giro del capo cominciò
subito a usarlo. Il viaggio era più breve di alcune settimane, e l'assicurazione costava meno di prima. Alcuni dei
vecchi porti non si ripresero dal cambiamento. Altri furono ingranditi, perché il carbone per i piroscafi doveva essere
conservato da qualche parte lungo la via. Negli anni seguenti i proprietari del canale alzarono più di una volta i loro
prezzi, ma pochi capitani tornarono alla rotta lunga.
""",
    "pt": """
Quando o novo canal foi aberto, a maior parte dos navios que até então davam a volta ao cabo começou logo a usá-lo. A
viagem era algumas semanas mais curta, e o seguro custava menos do que antes. Alguns dos velhos portos não se
recuperaram da mudança. Outros foram ampliados, porque o carvão para os vapores tinha de ser guardado em algum lugar do
caminho. Nos anos seguintes os donos do canal aumentaram mais de uma vez os seus preços, mas poucos capitães voltaram à
rota longa.
""",
    "nl": """
Toen het nieuwe kanaal werd geopend, gingen de meeste schepen die tot dan toe om de kaap waren gevaren het meteen
gebruiken. De reis was nu enkele weken korter, en de verzekering kostte minder dan voorheen. Sommige van de oude havens
herstelden zich niet van de verandering. Andere werden vergroot, omdat de kolen voor de stoomschepen ergens onderweg
moesten worden opgeslagen. In de jaren daarna verhoogden de eigenaren van het kanaal meer dan eens hun prijzen.
""",
    "zh": """
新运河开通以后，过去绕过海角的船大多数很快就改走这条水路。航程缩短了好几个星期，保险的费用也比以前低了。有些旧港口没有从
这个变化中恢复过来。另一些港口却扩大了，因为轮船用的煤必须存放在途中的某个地方。在以后的几年里，运河的主人不止一次地提高了
价格，但是很少有船长回到那条漫长的航线。
""",
}
"""A paragraph in each language, of the same content."""

UNKNOWN = {
    "code": """
def read(path, limit=10):
    with open(path) as file:
        lines = [line.split(",") for line in file if not line.startswith("#")]
    return {name: float(value) for name, value in lines[:limit]}

class Reader(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = collections.OrderedDict()
""",
    "table": "date,price,volume\n" + "2019-03-04,17.25,1200\n2019-03-05,17.50,900\n" * 20,
    "Catalan": """
Quan es va obrir el nou canal, la majoria dels vaixells que fins aleshores feien la volta al cap van començar de
seguida a fer-lo servir. El viatge era unes quantes setmanes més curt, i l'assegurança costava menys que abans. Alguns
dels vells ports no es van recuperar del canvi.
""",
    "Danish": """
Da den nye kanal blev åbnet, begyndte de fleste skibe, som hidtil havde sejlet rundt om kappet, straks at bruge den.
Rejsen var nu flere uger kortere, og forsikringen kostede mindre end før. Nogle af de gamle havne kom sig ikke over det.
""",
    "Japanese": """
新しい運河が開通すると、それまで岬を回っていた船のほとんどがすぐにこれを使い始めた。航海は数週間短くなり、保険料も以前より安く
なった。古い港のいくつかはこの変化から立ち直ることができなかった。
""",
    "Russian": """
Когда новый канал был открыт, большинство судов, которые до тех пор огибали мыс, сразу же начали им пользоваться.
Путешествие стало короче на несколько недель, а страховка обходилась дешевле, чем раньше.
""",
    "short": "Yes.",
    "empty": "\n",
}
"""Texts in none of the languages."""

NOUNS = ["captain", "harbour", "canal", "engineer", "lighthouse", "crew", "merchant", "island", "storm", "company"]


def write_story(count: int, start: int = 0) -> str:
    """Write sentences of English that differ, in paragraphs of five."""
    verbs = ["measured", "reached", "described", "left", "repaired", "watched", "crossed", "bought"]
    ends = "before the ice came back|after a long winter|in spite of the rain|while the others slept|on the third day"
    sentences = []
    for number in range(start, start + count):
        first, second = NOUNS[number % 10], NOUNS[(number // 10) % 10]
        verb, end = verbs[number % 8], ends.split("|")[number % 5]
        sentences.append(
            f"On page {number} of the report the {first} {verb} the {second} that they had seen from the shore {end}."
        )
    return "\n\n".join(" ".join(sentences[at : at + 5]) for at in range(0, count, 5))
