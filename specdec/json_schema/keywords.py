"""Keywords of JSON schemas: what their values must be, and which are refused. Data only."""

# What the value of a keyword must be, as draft 2020-12 demands. Of those not named here, nothing is demanded.
VALUES = {
    **dict.fromkeys(("$schema", "$id", "$ref", "$anchor", "$comment", "title", "description", "format"), "text"),
    "pattern": "text",
    **dict.fromkeys(("contentEncoding", "contentMediaType", "$dynamicRef", "$dynamicAnchor"), "text"),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly", "uniqueItems"), "true or false"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "a number"),
    "multipleOf": "a number above 0",
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), "a whole number, at least 0"),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), "a whole number, at least 0"),
    "type": "a JSON type or a list of them",
    "required": "a list of different texts",
    **dict.fromkeys(("enum", "examples"), "a list"),
    **dict.fromkeys(("items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems"), "a schema"),
    **dict.fromkeys(("unevaluatedProperties", "not", "if", "then", "else", "contentSchema"), "a schema"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), "a list of at least one schema"),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), "an object of schemas"),
    **dict.fromkeys(("$defs", "definitions"), "an object of schemas"),
}
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
# Keywords that constrain values of one type, which is meant where the schema has no `type`.
MEANT = {
    **dict.fromkeys(("prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("patternProperties", "propertyNames", "minProperties", "maxProperties"), "object"),
}

_OUT = "leave it out"
# Keywords that no grammar follows, and the remedy. The first and `uniqueItems` say nothing with the value False.
REFUSED = {
    **dict.fromkeys(("not", "if", "then", "else"), _OUT),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), _OUT),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"), _OUT),
    "additionalItems": "write 'prefixItems' and 'items'",
    "$anchor": "refer to the schema by its place, '#/…'",
}
_DAY = r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_LEAP = r"([1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DATE = rf"({_DAY}|{_LEAP})"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_HEX}:){{7}}{_HEX}",
        *(f"(({_HEX}:){{{n - 1}}}{_HEX})?::(({_HEX}:){{0,{6 - n}}}{_HEX})?" for n in range(1, 7)),
        f"({_HEX}:){{6}}{_HEX}::|::({_HEX}:){{6}}{_HEX}",
    ]
)
_PCHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_FIRST = r"([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_TAIL = rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
_AUTHORITY = rf"//{_HOST}(:\d{{1,4}})?(/{_PCHAR}*)*"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:({_AUTHORITY}|/?({_PCHAR}+(/{_PCHAR}*)*)?){_TAIL}"
_RELATIVE = rf"({_AUTHORITY}|/({_PCHAR}+(/{_PCHAR}*)*)?|({_FIRST}+(/{_PCHAR}*)*)?){_TAIL}"
_VARIABLE = r"[A-Za-z0-9_]+(:[1-9]\d{0,3}|\*)?"
_POINTER = r"(/([^~/]|~[01])*)*"
# Formats that are followed, as regular expressions that match the whole text.
FORMATS = {
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P((\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)({_CLOCK})?|{_CLOCK}|\d+W)",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOST,
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": rf"([!#$&(-;=?-[\]_a-z~]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
}
