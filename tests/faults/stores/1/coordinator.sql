BEGIN TRANSACTION;
CREATE TABLE closings (
    run text, round integer, exchange integer, cid text, primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,0,'d00');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,0,'d01');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,0,'d02');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,0,'d03');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,1,'d00');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,1,'d01');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,1,'d02');
INSERT INTO "closings" VALUES('51a7eba8c854457a',1,1,'d03');
CREATE TABLE devices (cid text primary key, n integer not null, engine text not null) without rowid;
INSERT INTO "devices" VALUES('d00',40,'onnx');
INSERT INTO "devices" VALUES('d01',41,'onnx');
INSERT INTO "devices" VALUES('d02',42,'onnx');
INSERT INTO "devices" VALUES('d03',43,'onnx');
CREATE TABLE events (id integer primary key, line text not null);
INSERT INTO "events" VALUES(1,'{"event":"start","epoch":1,"federation":"test","unix_ms":1700000001000}');
INSERT INTO "events" VALUES(2,'{"event":"program","model":"softmax","parity":{"onnx":null},"seconds":0.0}');
INSERT INTO "events" VALUES(3,'{"event":"joined","device":"d00","engine":"onnx","n":40}');
INSERT INTO "events" VALUES(4,'{"event":"joined","device":"d01","engine":"onnx","n":41}');
INSERT INTO "events" VALUES(5,'{"event":"joined","device":"d02","engine":"onnx","n":42}');
INSERT INTO "events" VALUES(6,'{"event":"joined","device":"d03","engine":"onnx","n":43}');
INSERT INTO "events" VALUES(7,'{"event":"round","run":"fesem","method":"fesem","round":1,"of":2,"accuracy":{"micro":0.975,"macro":0.9750000000000001},"f1":{"micro":0.9725274725274724,"macro":0.9725274725274726},"per_device":{"d00":1.0,"d01":1.0,"d02":0.95,"d03":0.95},"per_center":[0.975,0.975],"assignment":{"d00":0,"d01":1,"d02":0,"d03":1},"bytes":{"down":15339,"up":10520},"seconds":0.0}');
CREATE TABLE exchanges (
    run text, round integer, exchange integer, left_ms integer not null, closed integer not null default 0,
    primary key (run, round, exchange)) without rowid;
INSERT INTO "exchanges" VALUES('51a7eba8c854457a',1,0,300000,1);
INSERT INTO "exchanges" VALUES('51a7eba8c854457a',1,1,300000,1);
INSERT INTO "exchanges" VALUES('51a7eba8c854457a',2,0,300000,0);
CREATE TABLE meta (key text primary key, value text not null) without rowid;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('lesson','{"codec": "f32", "federation": "test", "model": {"batch-size": 8, "engines": ["onnx"], "name": "softmax"}, "runs": [{"batch-size": 8, "clusters": 2, "local-steps": 3, "method": "fesem", "name": "fesem", "restarts": 3, "rounds": 2}], "seed": 3}');
INSERT INTO "meta" VALUES('program','{"program": "2929ac30fd8fb164afcb3277f7b86e9dcc53e4373d06540bbaec980374649eaf", "initial": "24b8958878c3c69fbb9cdfc6da3f7ba524807474f2b25b078d680d9b0c5521bc"}');
INSERT INTO "meta" VALUES('schema','1');
CREATE TABLE replies (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,0,'d00','c91dadc91d8a37bcc03180aecb03f92fdcb652a002cb610ee365007a14e790fb',464,40,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,0,'d01','427d94141ed0c0dd477577d19692fa5c2368e230c20fa43002da8e48c66282a0',464,41,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,0,'d02','d452744ccbba1c475192f074492dae69c9c0977caefd597d8e454430a3fe8ac5',464,42,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,0,'d03','eb1fafdc74182d5040655c84af404f5364137222c10bcddb75d3f747fdba2b0f',464,43,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,1,'d00','4eba3a8bdc3519a1171264b1f37fed81c89944221c056e9b23a450b87834ccaf',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,1,'d01','446969435437c2e99738302791c7e4a78e418ef51bfcf965031f9e290f933d46',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,1,'d02','cbb2fea406b25b8f1e7e8f7a669b0abf3da0c44ced8b93c7c50d0f4ce4a4b87d',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',1,1,'d03','cac8aff9461162dea974a499c513b82e635b34af5ccb2107e8dc735d54ffa32e',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',2,0,'d00','8c9db382c19991213e332b93fc88b37466bd9709f171f64b93b49aca12ea0e1f',464,40,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',2,0,'d01','a32ee93a9203f7c4933a88ce4cfa5b9c66f94bc8b161670d713dbd1a4f28ba44',464,41,'delta','de3d577e4444a6707834b6b373c2058ae3d9ab28bf01f1f5a28f8ec5f7f708e8',0.0);
INSERT INTO "replies" VALUES('51a7eba8c854457a',2,0,'d02','13a9cda94a476f65cf9618e1ad14dec231c570ae22c621a406a1aa728a58095d',464,42,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
CREATE TABLE runs (name text primary key, run text not null unique) without rowid;
INSERT INTO "runs" VALUES('fesem','51a7eba8c854457a');
CREATE TABLE states (run text, round integer, blob text not null, primary key (run, round)) without rowid;
INSERT INTO "states" VALUES('51a7eba8c854457a',0,'86a2d943ebf8ea434e5a00732d4a1efd9cd55fd75373b963af13b67736d6634b');
INSERT INTO "states" VALUES('51a7eba8c854457a',1,'20ec3153e1d963acba184e814dd40607bc090bc14fbe0e37c2c2f339b78c4887');
CREATE TABLE tasks (
    run text, round integer, exchange integer, cid text, sha256 text not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,0,'d00','9237fa9d4df168360a38ff12265e9f6272634ac2d013d3b9f94361e0ddd0b490');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,0,'d01','7a5ae4efee3b89fbfd860e6e04de9df5ecef899e698f3fa3658a82d232c6f740');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,0,'d02','d872ec9453235d354bef0e87c346ab6a64668566f47606fe1469c73da0771f15');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,0,'d03','1b40a03cf7c16e5e379aa88c18fb77d4af30f2c6240a14c74ac245cee709a96b');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,1,'d00','3f8aea1dd99df48122f6f956ab7664dccbfcec4cdde7dcebd79cbf4d4f43a2c6');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,1,'d01','930d3b41c158d78ecdadd63427a39fceb5f4207bf50f2541446199b6574ff31e');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,1,'d02','3f8aea1dd99df48122f6f956ab7664dccbfcec4cdde7dcebd79cbf4d4f43a2c6');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',1,1,'d03','930d3b41c158d78ecdadd63427a39fceb5f4207bf50f2541446199b6574ff31e');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',2,0,'d00','86562d21102d0f4465e443b0bbe637f9965e981ff131d275a93bdbcf3a04fa4a');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',2,0,'d01','b73d23a10aeb69602842594d6e965ec82fd8190218ba254e376189bf498f545a');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',2,0,'d02','ca080c8497a68ef3a22df73a45654bb6562044b59e94e34ca33d4884e840f8c6');
INSERT INTO "tasks" VALUES('51a7eba8c854457a',2,0,'d03','0760d2e65aea55e4d5d13804e6ac3817ffe4cbb28d2d5c13db70651fa6ac0a9a');
COMMIT;
