(() => {
{% include "graph/data.js" %}

{% include "graph/cards.js" %}

{% include "graph/ranks.js" %}

{% include "graph/drawing.js" %}

{% include "graph/search.js" %}

{% include "graph/start.js" %}

})();
