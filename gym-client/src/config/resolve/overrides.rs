//! Command-line overrides in Hydra's language: `+key=value`, `++key=value`, `key=value`, `~key`.
//!
//! `+` adds a key, and `++` adds or replaces one, before the files are merged, as in NeMo Gym. `key=value` and `~key`
//! change keys of the merged files; NeMo Gym rejects them there.

use crate::config::problem::{ConfigError, Mistake, Origin, Problem, nearest};
use crate::config::resolve::grammar::{Inserted, ValueParser};
use crate::config::yaml::node::{Key, Map, Node, Tree};

/// The location in errors about overrides.
pub(crate) const COMMAND_LINE: &str = "command line";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OverrideVerb {
    /// `+key=value`
    Add,
    /// `++key=value`
    Force,
    /// `key=value`
    Change,
    /// `~key`
    Delete,
}

#[derive(Clone, Debug)]
struct ParsedOverride {
    verb: OverrideVerb,
    path: Vec<String>,
    value: Option<Node>,
    text: String,
}

/// Parsed command-line overrides, in their order.
///
/// ```
/// use gym_client::config::Overrides;
///
/// let overrides = Overrides::parse(["+policy_model_name=my-model", "head_server.port=11001"])?;
/// assert!(Overrides::parse(["no equals sign"]).is_err());
/// # Ok::<(), gym_client::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    items: Vec<ParsedOverride>,
}

impl Overrides {
    /// Parses the arguments and reports all invalid ones together.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with one problem for each argument that is not an override.
    pub fn parse<I>(arguments: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let mut items = Vec::new();
        let mut problems = Vec::new();
        for argument in arguments {
            match parse_one(argument.as_ref()) {
                Ok(item) => items.push(item),
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() { Ok(Self { items }) } else { Err(ConfigError::Invalid(problems)) }
    }

    /// Returns `true` if an argument looks like an override, and not like an option or a file.
    #[must_use]
    pub fn looks_like_one(argument: &str) -> bool {
        let argument = unquoted(argument);
        let body = argument.trim_start_matches(['+', '~']);
        !argument.starts_with('-') && (argument.starts_with('~') || body.contains('=')) && !body.is_empty()
    }

    /// Returns `true` if there are no overrides.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the tree that `+` and `++` build, and the overrides that apply to the merged files.
    pub(crate) fn tree(&self) -> Result<(Node, LateOverrides<'_>), ConfigError> {
        let mut root = Node::map(Vec::new(), &Origin::of(COMMAND_LINE));
        let mut late = Vec::new();
        let mut problems = Vec::new();
        for item in &self.items {
            let there = root.at(&item.path);
            let result = match (item.verb, &item.value) {
                (OverrideVerb::Add, Some(value)) => match there {
                    Some(node) if !value.is_container() && !matches!(node.value, Tree::Null) => Err(item
                        .problem("the key is set twice")
                        .fix("keep one, or write ++ to replace the earlier value")),
                    _ => update(&mut root, &item.path, value).map_err(|what| item.problem(what)),
                },
                (OverrideVerb::Force, Some(value)) => {
                    update(&mut root, &item.path, value).map_err(|what| item.problem(what))
                }
                (OverrideVerb::Change, Some(value)) if there.is_some() => {
                    update(&mut root, &item.path, value).map_err(|what| item.problem(what))
                }
                (OverrideVerb::Delete, _) if there.is_some() => {
                    remove(&mut root, &item.path);
                    Ok(())
                }
                (OverrideVerb::Change | OverrideVerb::Delete, _) if item.path[0] == "config_paths" => Err(item
                    .problem("config_paths is read before this override is applied")
                    .fix("write +config_paths=[a.yaml,b.yaml]")),
                _ => {
                    late.push(item);
                    Ok(())
                }
            };
            if let Err(problem) = result {
                problems.push(problem);
            }
        }
        if problems.is_empty() { Ok((root, LateOverrides(late))) } else { Err(ConfigError::Invalid(problems)) }
    }
}

/// The overrides `key=value` and `~key`, which apply to the merged files.
#[derive(Debug)]
pub(crate) struct LateOverrides<'a>(Vec<&'a ParsedOverride>);

impl LateOverrides<'_> {
    pub(crate) fn apply(&self, root: &mut Node) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        for item in &self.0 {
            let Some(there) = root.at(&item.path) else {
                problems.push(item.absent(root));
                continue;
            };
            match (&item.value, item.verb) {
                (Some(value), OverrideVerb::Delete) if there.to_json() != value.to_json() => problems.push(
                    item.problem("the key has another value and was not deleted")
                        .fix(format!("write ~{} to delete it regardless of its value", item.path.join("."))),
                ),
                (_, OverrideVerb::Delete) => remove(root, &item.path),
                (Some(value), _) => {
                    if let Err(what) = update(root, &item.path, value) {
                        problems.push(item.problem(what));
                    }
                }
                (None, _) => {}
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(problems)) }
    }
}

impl ParsedOverride {
    fn problem(&self, what: impl Into<Box<str>>) -> Problem {
        let what: Box<str> = what.into();
        let what = format!("{what} (in '{}')", hidden(&self.text));
        Problem::new(Mistake::Override, &Origin::of(COMMAND_LINE), self.path.join("."), what)
    }

    fn absent(&self, root: &Node) -> Problem {
        let mut parent = root;
        let mut known = 0;
        while let Some(next) = self.path.get(known).and_then(|step| parent.step(step)) {
            parent = next;
            known += 1;
        }
        let names: Vec<String> =
            parent.as_map().map(|map| map.0.iter().map(|(key, _)| key.to_string()).collect()).unwrap_or_default();
        let near = nearest(&self.path[known.min(self.path.len() - 1)], names.iter().map(String::as_str));
        let near = near.map(|name| format!("did you mean '{}'? ", joined(&self.path[..known], name)));
        let near = near.unwrap_or_default();
        match self.verb {
            OverrideVerb::Delete => {
                self.problem("the key to delete does not exist").fix(format!("{near}otherwise remove the override"))
            }
            _ => self
                .problem("no file defines the key")
                .fix(format!("{near}to add a new key, write +{}", hidden(&self.text))),
        }
    }
}

fn joined(path: &[String], last: &str) -> String {
    path.iter().map(String::as_str).chain([last]).collect::<Vec<_>>().join(".")
}

/// Hides the value if the key names a secret, so that errors do not repeat it.
fn hidden(text: &str) -> String {
    match text.split_once('=') {
        Some((key, _)) if crate::config::yaml::writer::is_secret_key(key.rsplit('.').next().unwrap_or(key)) => {
            format!("{key}=****")
        }
        _ => text.to_owned(),
    }
}

/// Returns the argument without surrounding quotes, which copied commands may contain.
fn unquoted(argument: &str) -> &str {
    let trimmed = argument.trim();
    for quote in ['"', '\''] {
        if let Some(inner) = trimmed.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote))
            && inner.starts_with(['+', '~'])
        {
            return inner;
        }
    }
    trimmed
}

fn parse_one(argument: &str) -> Result<ParsedOverride, Problem> {
    let text = unquoted(argument);
    let origin = Origin::of(COMMAND_LINE);
    let bad = |what: String, fix: String| Problem::new(Mistake::Override, &origin, "", what).fix(fix);
    let (verb, rest) = if let Some(rest) = text.strip_prefix("++") {
        (OverrideVerb::Force, rest)
    } else if let Some(rest) = text.strip_prefix('+') {
        (OverrideVerb::Add, rest)
    } else if let Some(rest) = text.strip_prefix('~') {
        (OverrideVerb::Delete, rest)
    } else {
        (OverrideVerb::Change, text)
    };
    let (key, value) = match rest.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (rest, None),
    };
    if value.is_none() && verb != OverrideVerb::Delete {
        return Err(bad(
            format!("'{text}' is not an override: it has no '='"),
            format!("write {text}=VALUE, or ~{rest} to delete a key"),
        ));
    }
    if key.is_empty() {
        return Err(bad(format!("'{}' has no key", hidden(text)), "write +key=value".to_owned()));
    }
    if key != key.trim() {
        return Err(bad(
            format!("'{}' has a space around its key", hidden(text)),
            format!("remove the space: +{}=…", key.trim()),
        ));
    }
    if key.contains('/') || key.contains('@') {
        return Err(bad(
            format!("'{key}' is a Hydra config group, which is not supported"),
            "separate keys with dots: a.b.c".to_owned(),
        ));
    }
    let path: Vec<String> = key.split('.').map(str::to_owned).collect();
    for (index, step) in path.iter().enumerate() {
        let word = step.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '$')
            && step.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'$'));
        let number = index > 0 && !step.is_empty() && step.bytes().all(|b| b.is_ascii_digit());
        if !word && !number {
            let shown = if step.is_empty() { "an empty part".to_owned() } else { format!("'{step}'") };
            return Err(bad(
                format!("'{key}' is not a valid key: {shown} is not a name"),
                "use letters, digits, _ and -, separated by dots, for example a.b.c; set keys with other names in a file"
                    .to_owned(),
            ));
        }
    }
    let value = match value.map(str::trim) {
        None => None,
        Some("") => Some(Node::text("", &origin)),
        Some(value) => Some(ValueParser::new(value, &origin, |_| Ok(Inserted::Verbatim)).only().map_err(|what| {
            let shown = hidden(text);
            let fix = if what.starts_with("a list without") {
                format!("write brackets: {key}=[{value}]")
            } else if shown == text {
                format!(
                    "quote the value for this parser and for the shell: '{}=\"{}\"'",
                    &text[..text.len() - value.len() - 1],
                    value.replace('"', "\\\"")
                )
            } else {
                "quote the value for this parser and for the shell: '+key=\"value\"'".to_owned()
            };
            Problem::new(Mistake::Override, &origin, key, format!("cannot parse '{shown}': {what}")).fix(fix)
        })?),
    };
    Ok(ParsedOverride { verb, path, value, text: text.to_owned() })
}

/// Sets a key and creates the mappings on its path; mappings are merged, lists replaced.
fn update(root: &mut Node, path: &[String], value: &Node) -> Result<(), String> {
    let (last, way) = path.split_last().expect("a key has at least one step");
    let mut place = root;
    for step in way {
        if !place.is_container() {
            place.value = Tree::Map(Map::default());
        }
        let origin = value.origin.clone();
        place = match &mut place.value {
            Tree::List(items) => {
                let length = items.len();
                step.parse::<usize>()
                    .ok()
                    .and_then(|index| items.get_mut(index))
                    .ok_or_else(|| format!("the list has {length} entries, so '{step}' does not exist"))?
            }
            Tree::Map(map) => {
                let key = map
                    .0
                    .iter()
                    .find(|(k, _)| k.to_string() == *step)
                    .map_or(Key::from(step.as_str()), |(k, _)| k.clone());
                if map.get_key(&key).is_none() {
                    map.set(key.clone(), Node::new(Tree::Map(Map::default()), origin));
                }
                map.get_key_mut(&key).expect("set just above")
            }
            _ => unreachable!("converted to a mapping above"),
        };
        if !place.is_container() {
            *place = Node::new(Tree::Map(Map::default()), value.origin.clone());
        }
    }
    match &mut place.value {
        Tree::List(items) => {
            let length = items.len();
            let item = last
                .parse::<usize>()
                .ok()
                .and_then(|index| items.get_mut(index))
                .ok_or_else(|| format!("the list has {length} entries, so '{last}' does not exist"))?;
            *item = value.clone();
        }
        Tree::Map(map) => {
            let key =
                map.0.iter().find(|(k, _)| k.to_string() == *last).map_or(Key::from(last.as_str()), |(k, _)| k.clone());
            match (map.get_key_mut(&key), &value.value) {
                (Some(Node { value: Tree::Map(old), .. }), Tree::Map(new)) => overlay(old, new),
                _ => map.set(key, value.clone()),
            }
        }
        _ => return Err("the parent key is not a mapping".to_owned()),
    }
    Ok(())
}

fn overlay(old: &mut Map, new: &Map) {
    for (key, node) in &new.0 {
        match (old.get_key_mut(key), &node.value) {
            (Some(Node { value: Tree::Map(below), .. }), Tree::Map(above)) => overlay(below, above),
            (Some(_), _) if node.is_missing() => {}
            _ => old.set(key.clone(), node.clone()),
        }
    }
}

fn remove(root: &mut Node, path: &[String]) {
    let (last, way) = path.split_last().expect("a key has at least one step");
    let mut place = root;
    for step in way {
        let next = match &mut place.value {
            Tree::Map(map) => map.0.iter_mut().find(|(k, _)| k.to_string() == *step).map(|(_, node)| node),
            Tree::List(items) => step.parse::<usize>().ok().and_then(|index| items.get_mut(index)),
            _ => None,
        };
        match next {
            Some(next) => place = next,
            None => return,
        }
    }
    match &mut place.value {
        Tree::Map(map) => map.0.retain(|(key, _)| key.to_string() != *last),
        Tree::List(items) => {
            if let Some(index) = last.parse::<usize>().ok().filter(|index| *index < items.len()) {
                items.remove(index);
            }
        }
        _ => {}
    }
}
