use proptest::prelude::*;
use serde_json::{Value, json};

use super::index::members_parsed;
use super::*;

fn object(text: &str) -> RawObject {
    RawObject::parse(text.to_owned()).unwrap()
}

#[test]
fn numbers_spacing_and_escapes_stay_as_they_came() {
    let text = r#" { "a" : 1E5 , "b":[ 12345678901234567890123, -0.0 ],"\u0063":"\u00e9\n" } "#;
    let row = object(text);
    assert_eq!(row.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(row.get("a").unwrap(), "1E5");
    assert_eq!(row.get("c").unwrap(), r#""\u00e9\n""#);
    let edited = row.edit().set("b", "2").set("d", "true").to_rope().to_bytes();
    assert_eq!(edited, r#" { "a" : 1E5 , "b":2,"\u0063":"\u00e9\n","d":true } "#);
    assert_eq!(row.edit().to_rope().to_bytes(), text);
}

#[test]
fn removing_keys_leaves_an_object_behind() {
    let row = object(r#"{"a":1, "b":2, "c":3}"#);
    let without = |keys: &[&'static str]| {
        let edit = keys.iter().fold(row.edit(), |edit, key| edit.remove(*key));
        String::from_utf8(edit.to_rope().to_bytes().to_vec()).unwrap()
    };
    assert_eq!(without(&["a"]), r#"{ "b":2, "c":3}"#);
    assert_eq!(without(&["c"]), r#"{"a":1, "b":2}"#);
    assert_eq!(without(&["a", "b", "c"]), "{}");
    assert_eq!(row.edit().remove("a").remove("b").remove("c").set("d", "4").to_rope().to_bytes(), r#"{"d":4}"#);
    assert_eq!(RawObject::empty().edit().set("a", "1").to_rope().to_bytes(), r#"{"a":1}"#);
}

#[test]
fn of_equal_keys_the_last_counts() {
    let row = object(r#"{"a":1,"b":2,"\u0061":3}"#);
    assert_eq!(row.get("a").unwrap(), "3");
    #[derive(serde::Deserialize)]
    struct View {
        a: u32,
    }
    assert_eq!(row.view::<View>().unwrap().a, 3);
}

#[test]
fn what_is_not_an_object_says_where() {
    for (text, offset) in [(r#"{"a":}"#, 5), ("[1]", 0), ("", 0), (r#"{"a":1} x"#, 8), ("{\n\"a\" 1}", 6)] {
        let error = RawObject::parse(text).unwrap_err();
        assert_eq!(error.offset, offset, "{text}: {error}");
    }
}

#[test]
fn a_view_reads_what_it_names_and_names_what_it_cannot_read() {
    #[derive(serde::Deserialize, Debug, PartialEq)]
    struct View {
        expected: String,
        #[serde(default)]
        tolerance: Option<f64>,
    }
    let view: View = object(r#"{"junk":[1,{"x":2}],"expected":"5","tolerance":null}"#).view().unwrap();
    assert_eq!(view, View { expected: "5".into(), tolerance: None });
    let error = object(r#"{"expected":7}"#).view::<View>().unwrap_err();
    assert!(error.to_string().contains("`expected`"), "{error}");
}

/// Creates a response with `tokens` training tokens, as a model server sends it.
fn training_row(tokens: usize) -> (String, Value) {
    let ids: Vec<u32> = (0..u32::try_from(tokens).unwrap()).collect();
    let probs: Vec<f64> = ids.iter().map(|id| -f64::from(*id) / 7.0).collect();
    let value = json!({
        "prompt": "say \"x_token_ids\": [1, 2]",
        "response": {"output": [
            {"type": "message", "prompt_token_ids": ids, "generation_token_ids": [], "generation_log_probs": probs, "content": []},
            {"type": "reasoning", "generation_token_ids": ids, "summary": ["ok"]},
        ], "id": "r1"},
        "tail_token_ids": ["not", "numbers"],
        "after": 5,
    });
    (serde_json::to_string_pretty(&value).unwrap(), value)
}

#[test]
fn a_large_text_is_read_without_its_training_arrays_and_kept_with_them() {
    let (text, value) = training_row(4_000);
    let row = object(&text);
    assert!(row.is_elided() && row.indexed().len() < text.len() / 20);
    assert_eq!(row.get("after").unwrap(), "5");
    assert_eq!(serde_json::from_slice::<Value>(&row.get("response").unwrap()).unwrap(), value["response"]);
    assert_eq!(row.view::<Value>().unwrap(), value);
    let response = row.get_object("response").unwrap().unwrap();
    assert_eq!(response.get("id").unwrap(), r#""r1""#);
    assert_eq!(response.text(), &row.get("response").unwrap());
    assert_eq!(serde_json::from_slice::<Value>(&response.get("output").unwrap()).unwrap(), value["response"]["output"]);
    let outline: Value = response.outline().unwrap();
    assert_eq!(outline["output"][0]["prompt_token_ids"], json!([]));
    assert_eq!(outline["output"][1]["summary"], json!(["ok"]));
    let edited = row.edit().set("after", "6").set("reward", "1").to_rope();
    assert!(edited.pieces().len() > 1, "the large part is shared");
    let mut expected = value;
    expected["after"] = json!(6);
    expected["reward"] = json!(1);
    assert_eq!(serde_json::from_slice::<Value>(&edited.to_bytes()).unwrap(), expected);
}

#[test]
fn the_grammar_of_a_training_array_is_checked_when_asked_for() {
    for (array, fine) in [("1,2", true), ("1,,2", false), ("1 2", false), (".", false), ("01", false)] {
        let text = format!(r#"{{"prompt_token_ids":[{array}],"pad_log_probs":[{}0]}}"#, "0.5,".repeat(8_000));
        assert_eq!(object(&text).check().is_ok(), fine, "{array}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z\"\\\\:\\[\\]_é]{0,12}".prop_map(Value::from),
        prop::collection::vec(any::<i32>(), 0..40).prop_map(Value::from),
    ];
    let key =
        prop_oneof![Just("prompt_token_ids".to_owned()), Just("generation_log_probs".to_owned()), "[a-z\"_]{0,6}"];
    leaf.prop_recursive(3, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn an_edit_changes_only_what_it_names(value in any_json(), filler in any::<bool>(), pretty in any::<bool>()) {
        let mut row = json!({"value": value, "generation_token_ids": vec![7; if filler { 9_000 } else { 1 }], "z": 1});
        let text = if pretty { serde_json::to_string_pretty(&row) } else { serde_json::to_string(&row) }.unwrap();
        let raw = RawObject::parse(text.clone()).unwrap();
        prop_assert_eq!(&raw.view::<Value>().unwrap(), &row);
        prop_assert_eq!(raw.edit().to_rope().to_bytes(), text.as_bytes());
        if let Some(inner) = raw.get_object("value").ok().flatten() {
            prop_assert_eq!(&inner.view::<Value>().unwrap(), &row["value"]);
        }
        let edited = raw.edit().set("z", "[2]").remove("generation_token_ids").set("new", "{}").to_object().unwrap();
        row["z"] = json!([2]);
        row.as_object_mut().unwrap().shift_remove("generation_token_ids");
        row["new"] = json!({});
        prop_assert_eq!(edited.view::<Value>().unwrap(), row);
    }

    #[test]
    fn no_text_makes_it_panic_and_hollow_agrees_with_a_full_parse(
        pieces in prop::collection::vec(prop_oneof![
            Just("\"prompt_token_ids\""), Just(":"), Just("["), Just("]"), Just("1,2"), Just("{"), Just("}"),
            Just("\\\""), Just("\"a\""), Just(","), Just(" "), Just("null"), Just("\"_log_probs\""),
        ], 0..24),
    ) {
        let text: String = pieces.concat();
        // Long enough to be elided: an object whose first field is filler.
        let padded = format!("{{\"pad_token_ids\":[{}1],\"rest\":{text}}}", "1,".repeat(9_000));
        let elided = RawObject::parse(padded.clone());
        let full = serde_json::from_str::<Value>(&padded);
        if let Ok(full) = full {
            prop_assert_eq!(elided.unwrap().view::<Value>().unwrap(), full);
        }
    }
}

/// Checks that the parser returns the same positions for every text that the scan accepts; other texts are left to the parser.
fn scan_agrees(text: &[u8]) {
    let Some(members) = scan::members(text) else { return };
    let parsed = members_parsed(text);
    let parsed = parsed.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)));
    assert_eq!(members, parsed, "{}", String::from_utf8_lossy(text));
}

#[test]
fn the_scan_takes_what_rows_are_made_of() {
    for text in
        ["{}", " {\t} ", r#"{"a":"b\"\\\u00e9é","c":[1,-0.5e+7,{"d":{}},[],null,true],"e":{"f":[[{}]] , "g":false}}"#]
    {
        assert!(scan::members(text.as_bytes()).is_some(), "{text}");
        scan_agrees(text.as_bytes());
    }
    for text in
        ["", "{", "[]", r#"{"a":01}"#, r#"{"a":1,}"#, r#"{"a":[1,]}"#, r#"{"a":.5}"#, r#"{"a":"\x"}"#, "{\"a\":\"\n\"}"]
    {
        assert!(scan::members(text.as_bytes()).is_none(), "{text}");
    }
    assert!(scan::members(b"{\"a\":\"\xff\"}").is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_scan_never_takes_what_the_parser_refuses(
        pieces in proptest::collection::vec(
            prop_oneof![
                Just("{"), Just("}"), Just("["), Just("]"), Just(","), Just(":"), Just("\"a\""), Just("\"b\\n\""),
                Just("\"long enough for eight\""), Just("\"é\""), Just("1"), Just("-0"), Just("1.5E-3"), Just("01"),
                Just("true"), Just("null"), Just(" "), Just("\n"), Just("\""), Just("\\"), Just("\"a\":1"), Just("\u{1}"),
            ],
            0..14,
        ),
    ) {
        scan_agrees(pieces.concat().as_bytes());
        scan_agrees(format!("{{\"k\":{}}}", pieces.concat()).as_bytes());
    }

    #[test]
    fn the_scan_survives_a_changed_byte(at in 0_usize..200, byte in any::<u8>()) {
        let mut text = br#"{"id":"resp","n":[1,2.5,-3e7],"o":{"a":[{"b":"c\n"},null,true,[[]]],"usage":{"x":0}},"text":"a longer text"}"#.to_vec();
        let at = at % text.len();
        text[at] = byte;
        scan_agrees(&text);
    }
}

fn value() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just("1E5"),
        Just("null"),
        Just(r#""\u00e9 \"x\"""#),
        Just(r#"[1, {"a":[]}]"#),
        Just(r#"{"a": {}, "b":-0}"#)
    ]
}

#[test]
fn an_object_that_is_set_need_not_be_parsed_again_whatever_is_around_it() {
    for (inner, known) in [(r#"{"b":[1E5]}"#, true), (r#" {"b":2}"#, false), ("{} ", false)] {
        let rope =
            object(r#"{"a":0,"z":1}"#).edit().set_object("a", object(inner)).set_object("n", object(inner)).to_rope();
        assert_eq!(rope.is_parsed(), known, "{inner}");
        let edited = rope.to_object().unwrap();
        assert_eq!(edited.text(), &format!(r#"{{"a":{inner},"z":1,"n":{inner}}}"#));
        assert_eq!(edited.fields(), RawObject::parse(edited.text().clone()).unwrap().fields());
    }
}

proptest! {
    #[test]
    fn the_index_of_an_edited_text_is_the_one_that_parsing_it_gives(
        members in proptest::collection::vec(("[a-d\"é]{0,2}", value(), " {0,2}"), 0..6),
        changes in proptest::collection::vec(("[a-f\"é]{0,2}", proptest::option::of(value()), " {0,1}"), 0..5),
    ) {
        let quoted = |key: &str| Value::from(key).to_string();
        let member = |(key, value, blank): &(String, _, _)| format!("{blank}{}:{blank}{value}{blank}", quoted(key));
        let members: Vec<String> = members.iter().map(member).collect();
        let object = RawObject::parse(format!(" {{{}}}", members.join(","))).unwrap();
        let mut edit = object.edit();
        for (key, value, blank) in changes {
            edit = match value {
                Some(value) => edit.set(key, format!("{blank}{value}{blank}")),
                None => edit.remove(key),
            };
        }
        let edited = edit.to_object().unwrap();
        let parsed = RawObject::parse(edited.text().clone()).unwrap();
        prop_assert_eq!(edited.fields(), parsed.fields());
    }
}

proptest! {
    #[test]
    fn an_edit_of_fields_changes_only_what_it_names(
        members in prop::collection::vec(("[a-e\\\\\"é😀]{0,3}", any_json()), 0..6),
        changes in prop::collection::vec(("[a-e\\\\\"é😀]{0,3}", any_json()), 0..4),
        pretty in any::<bool>(),
    ) {
        let mut expected: serde_json::Map<String, Value> = members.into_iter().collect();
        let value = Value::Object(expected.clone());
        let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
        let changes: Vec<_> = changes.into_iter().map(|(key, value)| (key, value.to_string())).collect();
        let fields = JsonFields::parse(&text).unwrap();
        let mut edit = fields.edit();
        for (key, value) in &changes {
            edit.set(key, value);
            expected.insert(key.clone(), serde_json::from_str(value).unwrap());
        }
        let edited: Value = serde_json::from_str(&edit.to_text()).unwrap();
        // Compared as text, so that the order of the keys counts.
        prop_assert_eq!(edited.to_string(), Value::Object(expected).to_string());
    }
}
